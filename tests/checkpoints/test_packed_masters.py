"""Packed masters on disk: checkpoints that train on, and exports in both formats."""

import json

import pytest
import torch
import zoo
from sparse_models import logits
from transformers import AutoModelForCausalLM

from hf_sparse24 import (
    Sparse24Config,
    export_model,
    patch_model,
    sparse_run,
    sparse_weights,
    unpack_model,
)
from hf_sparse24.weights.storage import PACKED, PackedMaster
from hf_sparse24_command import main

pytestmark = pytest.mark.usefixtures("dense_math")  # logits are compared bit for bit
CONFIG = Sparse24Config(method="fixed-mask", target_modules="all-linear", master="packed")


def made(name: str = "llama", **changes):
    model = zoo.build(name).eval()
    patch_model(model, CONFIG.replace(**changes))
    with torch.no_grad():
        for weight in sparse_weights(model, PackedMaster).values():
            weight.master.add_(torch.randn_like(weight.master))  # magnitudes no longer say where they are
    return model


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mistral"])
def test_a_checkpoint_trains_on(name, tmp_path):
    model = made(name)
    model.save_pretrained(tmp_path / "saved")
    loaded, report = zoo.auto_class(name).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(report.values()) and torch.equal(logits(loaded), logits(model))
    assert sparse_weights(loaded, PackedMaster).keys() == sparse_weights(model, PackedMaster).keys()
    assert [n for n, p in loaded.named_parameters()] == [n for n, p in model.named_parameters()]
    assert all(weight.master.requires_grad for weight in sparse_weights(loaded, PackedMaster).values())
    saved = loaded.config.quantization_config
    assert saved is sparse_run(loaded).saved and saved == model.config.quantization_config and saved.config == CONFIG
    assert not getattr(loaded, "is_quantized", False) and loaded.double().dtype == torch.float64
    loaded.float().save_pretrained(tmp_path / "again")
    assert torch.equal(logits(zoo.auto_class(name).from_pretrained(tmp_path / "again")), logits(model))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("format, values", [("dense", "float"), ("packed", "float"), ("packed", "int8")])
@pytest.mark.parametrize("pattern", ["2:4", "16:32"])
def test_exports(name, format, values, pattern, tmp_path, capsys):
    model = made(name, pattern=pattern)
    export_model(model, tmp_path, format, values=values, max_shard_size="20KB")
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()) and not sparse_weights(loaded, PackedMaster) and not sparse_weights(loaded)
    assert bool(sparse_weights(loaded, PACKED)) == (format == "packed")
    assert not any("packed" in name for name, _ in loaded.named_parameters())
    if values == "float":
        assert torch.equal(logits(loaded), logits(model))
    for name, weight in sparse_weights(loaded, PACKED).items():
        exact = sparse_weights(model, PackedMaster)[name].merged()
        rounded = 0 if values == "float" else exact.abs().max().item() / 254 * (1 + 1e-5)
        torch.testing.assert_close(weight.merged(), exact, rtol=0, atol=rounded)
    assert main(["verify", str(tmp_path)]) == 0
    assert f"all {len(sparse_weights(model, PackedMaster))} weights are {pattern}" in capsys.readouterr().out
    listed = json.loads((tmp_path / "sparse24.json").read_text())["config"]
    assert listed["master"] == "dense" and "packed" not in listed
    assert sparse_weights(model, PackedMaster) and sparse_run(model).config.master == "packed"


def test_every_way_in(tmp_path):
    """From dense weights, an export, and a checkpoint, with a config; and out to a dense master."""
    dense, model = zoo.build("llama"), made()
    dense.save_pretrained(tmp_path / "dense")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=CONFIG)
    patch_model(dense, CONFIG)
    assert torch.equal(logits(loaded), logits(dense)) and len(sparse_weights(loaded, PackedMaster)) == 14
    export_model(model, tmp_path / "packed", "packed")
    model.save_pretrained(tmp_path / "saved")
    for source in ("packed", "saved"):
        loaded = unpack_model(AutoModelForCausalLM.from_pretrained(tmp_path / source))
        patch_model(loaded, CONFIG)
        assert torch.equal(logits(loaded), logits(model)) and len(sparse_weights(loaded, PackedMaster)) == 14
    patch_model(unpack_model(loaded), Sparse24Config(method="fixed-mask", target_modules="all-linear"))
    assert torch.equal(logits(loaded), logits(model)) and len(sparse_weights(loaded)) == 14
