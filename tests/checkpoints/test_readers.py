"""Who reads an export while another replaces it, without hf_sparse24, one of an earlier version, or offloads it."""

import pytest
import torch
from checkpoints import patched
from sparse_models import logits
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.quantizers import auto

from hf_sparse24 import export_model, unpack_model

ONE, MANY = "5GB", "20KB"

pytestmark = pytest.mark.usefixtures("dense_math")  # logits are compared bit for bit

EXPORTS = [(format, size) for format in ("dense", "packed") for size in (ONE, MANY)]


@pytest.fixture(scope="module")
def models() -> list[PreTrainedModel]:
    models = [patched(), patched()]
    with torch.no_grad():
        for weight in models[1].parameters():
            weight.mul_(1.5)
    return models


@pytest.mark.parametrize("moment", ["config", "files"])
@pytest.mark.parametrize("new", EXPORTS)
@pytest.mark.parametrize("old", EXPORTS)
def test_a_reader_gets_one_of_two_models_or_an_error(old, new, moment, models, tmp_path, monkeypatch):
    """The other export comes when Transformers has read the config, or found the files and their index."""
    expected = [logits(model) for model in models]
    export_model(models[0], tmp_path, *old)
    config = AutoConfig.from_pretrained(tmp_path)
    if moment == "config":
        export_model(models[1], tmp_path, *new)
    else:
        load = PreTrainedModel._load_pretrained_model

        def replaced(*args, **kwargs):
            export_model(models[1], tmp_path, *new)
            return load(*args, **kwargs)

        monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", replaced)
    try:
        found = logits(type(models[0]).from_pretrained(tmp_path, config=config))
    except (OSError, RuntimeError, ValueError):
        assert (*old, moment) != ("dense", ONE, "config") or new != ("dense", ONE)  # which always has the same names
    else:
        assert any(torch.equal(found, each) for each in expected)
    monkeypatch.undo()
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected[1])


@pytest.mark.parametrize("size", [ONE, MANY])
def test_without_hf_sparse24_a_packed_export_names_it(size, models, tmp_path, monkeypatch):
    export_model(models[0], tmp_path, "packed", size)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not hasattr(loaded.config, "transformers_weights")  # of these files, not of the model
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "sparse24")
    with pytest.raises(ValueError, match=r"import hf_sparse24 .* before you load this model: its weights are packed"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "qwen2", "opt"])
def test_offloaded_biases_are_not_taken_for_missing(name, offload_buffers, tmp_path):
    model = patched(name)
    export_model(model, tmp_path, "packed")
    options = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "disk", "offload_buffers": offload_buffers}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    assert any(parameter.is_meta for parameter in loaded.parameters())
    assert torch.equal(logits(loaded), logits(model))
    with pytest.raises(ValueError, match="offloaded to a disk or a CPU; load it without device_map"):
        unpack_model(loaded)
