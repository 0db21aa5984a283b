"""Packed checkpoints whose layers have different patterns, and files with parts of two versions."""

import json

import pytest
import torch
import zoo
from sparse_models import logits
from transformers import AutoModelForCausalLM

from hf_sparse24 import Sparse24Config, export_model, pack_model, patch_model, sparse_weights
from hf_sparse24.weights.storage import DenseMaster, PackedMaster
from hf_sparse24_command import main

pytestmark = pytest.mark.usefixtures("dense_math")  # logits are compared bit for bit
WEIGHT = "model.layers.0.mlp.down_proj.weight"


def made(**settings):
    model = zoo.build("llama").eval()
    patch_model(model, Sparse24Config(method="fixed-mask", pattern="16:32", **settings))
    return model


@pytest.mark.parametrize("master", ["dense", "packed"])
@pytest.mark.parametrize("values", ["float", "int8"])
def test_a_pattern_for_each_layer(master, values, tmp_path):
    model = made(master=master, layer_patterns={"down_proj": "6:8", "up_proj": "1:4"})
    patterns = {name: weight.pattern for name, weight in sparse_weights(model, weights_of(master)).items()}
    assert patterns[WEIGHT] == (6, 8) and len({*patterns.values()}) == 3
    export_model(model, tmp_path / "packed", "packed", values=values)
    config = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert config["packed"]["weights"] == {name: str(pattern) for name, pattern in patterns.items()}
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert values == "int8" or torch.equal(logits(packed), logits(model))
    packed.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), logits(packed))
    assert main(["verify", str(tmp_path / "packed")]) == main(["verify", str(tmp_path / "again")]) == 0
    if master == "packed":
        model.save_pretrained(tmp_path / "saved")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert {name: weight.pattern for name, weight in sparse_weights(loaded, PackedMaster).items()} == patterns
        assert torch.equal(logits(loaded), logits(model))


def test_layers_without_a_packed_form_are_named_and_stay_dense(tmp_path, caplog):
    """The others are packed, and the output is the same."""
    model = zoo.build("llama", intermediate_size=48).eval()
    own = {"down_proj": "7:12", "up_proj": "8:16"}
    patch_model(model, Sparse24Config(method="fixed-mask", target_modules="all-linear", layer_patterns=own))
    before = logits(model)
    export_model(model, tmp_path, "packed")
    told = (
        "2 of 14 sparse layers have no packed form and {}: model.layers.0.mlp.down_proj (M of a packed 7:12 must divide"
    )
    assert "format='packed': " + told.format("are stored dense, with their zeros") in caplog.text
    pack_model(model)
    assert "pack_model: " + told.format("become dense, with their zeros") in caplog.text
    for packed in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        kinds = {name: type(module).__name__ for name, module in packed.named_modules() if name.endswith("_proj")}
        assert all(kind == ("Linear" if "down_proj" in name else "PackedLinear") for name, kind in kinds.items())
        assert torch.equal(logits(packed), before) and len(kinds) == 14


def weights_of(master):
    return PackedMaster if master == "packed" else DenseMaster
