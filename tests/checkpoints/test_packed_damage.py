"""The packed reader against damaged, mixed and hostile files: a clear error, never another tensor, no code run."""

import json
import os
import pickle
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpoints import patched
from safetensors.torch import load_file, save_file
from sparse_models import logits
from transformers import AutoModelForCausalLM

from hf_sparse24 import export_model
from hf_sparse24.packed_format import buffer_names
from hf_sparse24.tools.verification import Tensors
from hf_sparse24_command import main

NAME = "model.layers.0.mlp.up_proj.weight"
VALUES, MASK, SCALES = buffer_names(NAME)


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> Path:
    """`one` file, `many` files, and many of `another` model of the same sizes."""
    root = tmp_path_factory.mktemp("exports")
    model = patched()
    export_model(model, root / "one", "packed")
    export_model(model, root / "int8", "packed", values="int8")
    export_model(model, root / "many", "packed", max_shard_size="20KB")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    export_model(model, root / "another", "packed", max_shard_size="20KB")
    torch.save(logits(AutoModelForCausalLM.from_pretrained(root / "one")), root / "logits.pt")
    return root


@pytest.fixture
def copied(exports, tmp_path):
    return lambda name: Path(shutil.copytree(exports / name, tmp_path / name))


@contextmanager
def changed_config(directory: Path):
    """The content of config.json, written back as it is after the block."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    yield config
    path.write_text(json.dumps(config))


def of_no_export(directory: Path) -> Path:
    """As a model that was saved again, whose config names no export."""
    with changed_config(directory) as config:
        del config["quantization_config"]["packed"]["export"]
    return directory


def reject(directory: Path, message: str, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error, match=message):
        AutoModelForCausalLM.from_pretrained(directory)


def rewrite(directory: Path, change) -> None:
    path = directory / "packed.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def swapped(directory: Path, other: Path) -> None:
    first, second = sorted(directory.glob("*.safetensors"))[:2]
    os.rename(first, directory / "third")
    os.rename(second, first)
    os.rename(directory / "third", second)


def of_another_export(directory: Path, other: Path) -> None:
    """Renamed, of the same sizes, with other values."""
    ours, theirs = (sorted(path.glob("*.safetensors")) for path in (directory, other))
    assert not {path.name for path in ours} & {path.name for path in theirs}
    shutil.copy(*next(pair[::-1] for pair in zip(ours, theirs) if VALUES in load_file(pair[0])))


def one_more(directory: Path, other: Path) -> None:
    index = json.loads((directory / "packed.safetensors.index.json").read_text())
    save_file({"extra": torch.ones(2)}, directory / "extra.safetensors", metadata={"format": "pt"})
    index["weight_map"]["extra"] = "extra.safetensors"
    (directory / "packed.safetensors.index.json").write_text(json.dumps(index))


def config_of_another_export(directory: Path, other: Path) -> None:
    shutil.copy(other / "config.json", directory)


def changed_header(directory: Path, other: Path) -> None:
    """Two tensors of the same dtype and shape have changed places: the file is whole, and every tensor looks right."""
    path = next(path for path in sorted(directory.glob("*.safetensors")) if VALUES in load_file(path))
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    like = next(key for key in header if key != VALUES and header[key].get("shape") == header[VALUES]["shape"])
    header[VALUES], header[like] = header[like], header[VALUES]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    path.write_bytes(data[:8] + text + data[8 + length :])
    load_file(path)


def fails(directory: Path, capsys) -> None:
    assert main(["verify", str(directory)]) != 0
    capsys.readouterr()


@pytest.mark.parametrize("change", [of_another_export, one_more, config_of_another_export])
def test_files_that_were_not_exported_together(change, exports, copied, capsys):
    directory = copied("many")
    change(directory, exports / "another")
    reject(directory, "not the files that were exported together with config.json")
    fails(directory, capsys)


@pytest.mark.parametrize("change", [swapped, changed_header])
def test_files_of_one_export_that_were_changed(change, exports, copied, capsys):
    """Which loading does not see: they have the name of their export. `verify` has their hashes."""
    directory = copied("many")
    change(directory, exports / "another")
    fails(directory, capsys)


@pytest.mark.parametrize("file", ["../many/model.safetensors", "/model.safetensors", "", ["a"]])
def test_an_index_that_names_no_file_in_its_directory(copied, file):
    directory = copied("many")
    index = directory / "packed.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {VALUES: file}}))
    with pytest.raises(ValueError, match="must have a weight_map"):
        Tensors(directory)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_are_no_numbers(value, copied):
    directory = of_no_export(copied("one"))
    rewrite(directory, lambda tensors: tensors[VALUES].view(-1)[5].fill_(value))
    reject(directory, "NaN or inf in its values")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (SCALES, lambda x: x.index_fill(0, torch.tensor([3]), float("nan")), "NaN or inf in its scales"),
        (SCALES, lambda x: -x, "negative numbers, NaN or inf in its scales"),
        (VALUES, lambda x: x.index_fill(0, torch.tensor([3]), -128), "-128 in its values, which are -127 to 127"),
        (MASK, lambda x: x * 0, "its mask has groups of 4 that do not keep 2"),
        (SCALES, lambda x: None, "packed.values='int8', and it has .*'missing'"),
        (VALUES, lambda x: x.float(), "_values': 'F32'"),
        (VALUES, lambda x: x.view(torch.uint8), "_values': 'U8'"),
        (MASK, lambda x: x.view(torch.int8), "_mask': 'I8'"),
        (SCALES, lambda x: (x * 100).to(torch.int8), "_scales': 'I8'"),
        (SCALES, lambda x: x.repeat(1, 2), "size mismatch|mismatched"),
        (SCALES, lambda x: x.flatten(), "size mismatch|mismatched"),
        (VALUES, lambda x: x[:, :-4].clone(), "size mismatch|mismatched"),
        (MASK, lambda x: x[:, :-1].clone(), "size mismatch|mismatched"),
    ],
)
def test_damaged_int8_tensors(name, change, message, copied, capsys):
    """Loading refuses what `verify` finds too."""
    directory = of_no_export(copied("int8"))

    def apply(tensors):
        changed = change(tensors.pop(name))
        tensors |= {} if changed is None else {name: changed}

    rewrite(directory, apply)
    reject(directory, message, (ValueError, RuntimeError))
    assert main(["verify", str(directory)]) != 0
    printed = "".join(capsys.readouterr())
    assert NAME in printed and ("mismatch" not in message or "a packed weight" in printed)


@pytest.mark.parametrize("device_map", [None, {"": "disk"}])
def test_a_bias_is_missing(device_map, tmp_path):
    export_model(patched("gpt2"), tmp_path, "packed")
    of_no_export(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("transformer.h.0.mlp.c_fc.bias"))
    with pytest.raises(ValueError, match=r"c_fc.weight: \['bias'\] were not in its files"):
        AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map, offload_folder=tmp_path / "offloaded")


class Explodes:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_pickles_are_not_read(copied, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = copied("one")
    tensors = load_file(directory / "packed.safetensors")
    (directory / "packed.safetensors").unlink()
    torch.save(tensors, directory / "pytorch_model.bin")
    reject(directory, "packed.safetensors", OSError)  # what config.json names
    with changed_config(directory) as config:
        del config["transformers_weights"]  # as in a model that was saved again
    reject(directory, "a packed checkpoint has safetensors files alone")
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(Explodes()))
    reject(directory, "a packed checkpoint has safetensors files alone")
    (directory / "model.safetensors").write_bytes(pickle.dumps(Explodes()))
    reject(directory, "damaged or cut short", OSError)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("version", 4, r"packed.version=4: this version of hf_sparse24 reads 3"),
        ("version", 2, r"packed.version=2"),
        ("values", "int8", r"packed.values='int8', and it has .*_values': 'F32', .*_scales': 'missing'"),
        ("values", "int4", r"packed.values='int4': must be one of"),
        ("version", "1", r"packed.version='1'"),
        ("weights", {}, "packed.weights must have the pattern of each packed weight"),
        ("weights", [NAME], "packed.weights must have the pattern of each packed weight"),
        ("weights", {NAME: "4:2"}, "packed.weights: pattern='4:2'"),
        ("weights", {"model.norm.weight": "2:4"}, "'model.norm.packed_weight_values': 'missing'"),
        ("weights", {NAME: "2:4"}, "in the files, and config.json does not list it"),
        ("export", ["x"], r"packed.export=\['x'\]"),
        ("export", "0" * 64, r"\['packed.safetensors'\]: not the files that were exported together with config.json"),
    ],
)
def test_wrong_entries_of_the_config(key, value, message, copied):
    directory = copied("one")
    with changed_config(directory) as config:
        config["quantization_config"]["packed"][key] = value
    reject(directory, message, (ValueError, OSError))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.embed_tokens.weight", "which is no weight of a linear layer or of stacked experts"),
        ("model.layers.0.mlp", "which is no weight of a linear layer or of stacked experts"),
        ("a.b.weight", "LlamaForCausalLM has none of the weights in packed.weights"),
    ],
)
def test_packed_tensors_that_the_model_has_no_place_for(name, message, copied):
    directory = of_no_export(copied("one"))
    with changed_config(directory) as config:
        config["quantization_config"]["packed"]["weights"] = {name: "2:4"}

    def change(tensors):
        values, mask = tensors[VALUES].clone(), tensors[MASK].clone()
        for key in [key for key in tensors if key.endswith(("_values", "_mask"))]:
            del tensors[key]
        tensors |= dict(zip(buffer_names(name), (values, mask)))

    rewrite(directory, change)
    reject(directory, message)
