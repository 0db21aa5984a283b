"""What the other libraries are given, and what their checkpoints must be; no library is installed."""

import json
import sys

import pytest
import sparse24_kernels as kernels
import torch
from paths import RECIPES
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(RECIPES / "pretrained"))
import baseline_process
import baselines
import measure


@pytest.fixture
def material(tmp_path, models, monkeypatch) -> baselines.Material:
    """With two given sequences to calibrate on and one of the model, and nothing to evaluate on."""
    monkeypatch.setattr(measure, "CALIBRATION", 2)
    monkeypatch.setattr(measure, "OWN", 1)
    material = object.__new__(baselines.Material)
    material.folder, material.source = tmp_path, models / "dense"
    material.tokenizer = AutoTokenizer.from_pretrained(material.source)
    material.text("x").parent.mkdir()
    for name in ("calibration", "calibration_own"):
        rows = (json.dumps({"text": f"{i} {name} " * 200}) + "\n" for i in range(9))
        material.text(name).write_text("".join(rows))
    return material


def prune(model, batches, method) -> str:
    """As a library would, but by magnitude; the name of an installed package."""
    for layer in model.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.mul_(kernels.nm_mask(layer.weight))
    return "safetensors"


@pytest.mark.parametrize("with_own", [False, True])
def test_a_library_gets_the_same_tokens_and_leaves_a_plain_checkpoint(tmp_path, material, monkeypatch, with_own):
    given = []

    def library(model, batches, method):
        given.extend(torch.cat(batches).tolist())
        return prune(model, batches, method)

    monkeypatch.setitem(baseline_process.LIBRARIES, "modelopt", library)
    calibration = baselines.calibration_file(material, tmp_path / "baselines", with_own)
    output = tmp_path / "output"
    monkeypatch.setattr("sys.argv", ["", "modelopt", "x", str(material.source), str(calibration), str(output)])
    baseline_process.main()
    expected = material.blocks("calibration", measure.CALIBRATION_LENGTH, 2)
    if with_own:
        expected += material.blocks("calibration_own", measure.CALIBRATION_LENGTH, 1)
    assert given == expected
    about = json.loads((output / "cost.json").read_text())
    assert set(about["cost"]) == {"wall_s", "cpu_s", "peak_gb"} and about["cost"]["peak_gb"] > 0.1
    assert about["pruned_by"]["versions"]["torch"] == torch.__version__
    pruned = AutoModelForCausalLM.from_pretrained(output)
    assert type(pruned).__name__ == "LlamaForCausalLM" and not hasattr(pruned.config, "quantization_config")
    assert baselines.check(pruned, material.load(material.source)) == 7


def test_a_checkpoint_that_is_not_what_it_should_be_is_refused(models):
    dense, model = (AutoModelForCausalLM.from_pretrained(models / "dense") for _ in range(2))
    with pytest.raises(ValueError, match=r"layers\.0\..*\.weight is not 2:4: a group of 4 has 4 non-zeros"):
        baselines.check(model, dense)
    with torch.no_grad():
        prune(model, [], "")
        baselines.check(model, dense)
        model.model.norm.weight[3] += 1
    with pytest.raises(ValueError, match=r"model\.norm\.weight differs"):
        baselines.check(model, dense)
