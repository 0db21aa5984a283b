"""Versions 1 and 2 of the packed format: read as what they were, and saved as version 3."""

import json
from pathlib import Path

import pytest
import torch
from checkpoints import patched
from old_packed import write_old
from safetensors.torch import load_file, save_file
from sparse_models import logits
from transformers import AutoModelForCausalLM

from hf_sparse24 import Sparse24Config, export_model, sparse_weights, unpack_model
from hf_sparse24.packed_format import buffer_names
from hf_sparse24.serving.packed_layers import read_format
from hf_sparse24.weights.storage import PACKED, PackedMaster
from hf_sparse24_command import main

NAME = "model.layers.0.mlp.up_proj.weight"


def packed_in(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())["quantization_config"]["packed"]


def old_export(directory: Path, name: str = "llama", values: str = "float"):
    """What an export loaded as before it became an old one."""
    export_model(patched(name), directory, "packed", values=values)
    expected = AutoModelForCausalLM.from_pretrained(directory)
    write_old(directory)
    return expected


@pytest.mark.parametrize(("values", "version"), [("float", 1), ("int8", 2)])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_the_same_bits_and_saved_as_the_latest_version(name, values, version, tmp_path, capsys):
    expected = old_export(tmp_path / "old", name, values)
    assert packed_in(tmp_path / "old")["version"] == version
    assert main(["verify", str(tmp_path / "old")]) == 0 and main(["inspect", str(tmp_path / "old")]) == 0
    assert f"all {len(sparse_weights(expected, PACKED))} weights are 2:4" in capsys.readouterr().out
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "old", output_loading_info=True)
    assert not any(report.values()) and loaded.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(x, expected.state_dict()[key]) for key, x in loaded.state_dict().items())
    loaded.save_pretrained(tmp_path / "again")
    assert packed_in(tmp_path / "again")["version"] == 3
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    for model in (loaded, again, unpack_model(loaded)):
        assert torch.equal(logits(model), logits(expected))


def test_it_trains_on_as_packed_masters(tmp_path):
    expected = old_export(tmp_path / "old")
    config = Sparse24Config(method="fixed-mask", target_modules="all-linear", master="packed")
    with pytest.warns(UserWarning, match="already has a `quantization_config` attribute"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "old", quantization_config=config)
    assert len(sparse_weights(loaded, PackedMaster)) == 14 and torch.equal(logits(loaded), logits(expected))
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert packed_in(tmp_path / "again")["version"] == 3 and torch.equal(logits(again), logits(expected))


def test_an_engine_reads_what_is_packed(tmp_path):
    expected = old_export(tmp_path, values="int8")
    found = read_format(json.loads((tmp_path / "config.json").read_text())["quantization_config"])
    assert (found.version, found.values) == (2, "int8")
    assert found.weights == dict.fromkeys(sparse_weights(expected, PACKED), (2, 4))


@pytest.mark.parametrize("places", [0b0101, 0b0001, 0b0000])  # equal, and in descending order
def test_places_that_are_not_in_ascending_order_are_refused(places, tmp_path, capsys):
    old_export(tmp_path)
    path, indices = tmp_path / "packed.safetensors", buffer_names(NAME, version=2)[1]
    tensors = load_file(path)
    tensors[indices].view(-1)[3] = places << 4 | 0b0100
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ValueError, match=f"damaged, .*{NAME}: its mask has groups of 4 that do not keep 2"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert main(["verify", str(tmp_path)]) == 1 and NAME in capsys.readouterr().out


@pytest.mark.parametrize("weights", [{NAME: "2:4"}, [NAME, NAME], [3], []])
def test_a_list_of_weights_that_is_none_is_refused(weights):
    with pytest.raises(ValueError, match=r"packed.weights must have"):
        read_format({"packed": {"version": 1, "weights": weights, "files": {}}})
