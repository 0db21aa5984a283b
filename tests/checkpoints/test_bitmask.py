"""hf-sparse24 convert: sparse-24-bitmask checkpoints become exports, and damaged ones nothing."""

import json
import subprocess
import sys

import bitmask
import pytest
import torch
import zoo
from bitmask import SPARSITY, prune, set_quantization, write_bitmask, write_files
from checkpoints import patched
from safetensors.torch import load_file, save_file
from sparse_models import logits
from transformers import AutoModelForCausalLM

from hf_sparse24 import Sparse24Config, export_model, patch_model
from hf_sparse24.checkpoints import bitmask as library
from hf_sparse24.run import set_phase
from hf_sparse24.weights.sparse_weight import sparse_weights
from hf_sparse24_command import main

UP = "model.layers.1.mlp.up_proj"


def read(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()} if directory.exists() else None


def assert_same(directory, dense):
    """Both directories have the same model, bit for bit, whatever it is saved as."""
    found, expected = (logits(AutoModelForCausalLM.from_pretrained(path)) for path in (directory, dense))
    assert torch.equal(found, expected)
    assert main(["verify", str(directory)]) == 0


@pytest.mark.usefixtures("dense_math")
@pytest.mark.parametrize(
    ("name", "sizes", "dtype", "layout"),
    [
        ("llama", {}, torch.bfloat16, {}),
        ("llama", {"tie_word_embeddings": True}, torch.float16, {"size": "8KB"}),
        ("qwen2", {}, torch.float32, {"ignore": "layers.0."}),
        ("llama", {"intermediate_size": 60}, torch.bfloat16, {}),  # half a byte of each row's bitmask is unused
    ],
)
def test_a_checkpoint_is_rescued_bit_for_bit_and_packed_by_export(name, sizes, dtype, layout, tmp_path, capsys):
    model = prune(zoo.build(name, **sizes)).to(dtype)
    source, out, packed = tmp_path / "source", tmp_path / "out", tmp_path / "packed"
    parts = write_bitmask(model, source, **layout)
    (source / "tokenizer.json").write_text("{}")
    assert main(["convert", str(source), str(out), "--max-shard-size", "20KB"]) == 0
    assert main(["export", str(out), str(packed), "--format", "packed"]) == 0
    model.save_pretrained(tmp_path / "dense")
    for directory in (out, packed):
        assert_same(directory, tmp_path / "dense")
        assert (directory / "tokenizer.json").exists() and (directory / "generation_config.json").exists()
    printed = capsys.readouterr().out
    number = sum(key.endswith(".bitmask") for key in parts)
    assert f"dense, trained by fixed-mask: {number} weights are 2:4" in printed and "as exported" in printed
    assert f"packed, trained by fixed-mask: {number} weights are 2:4" in printed
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    tensors = {key: x for path in out.glob("*.safetensors") for key, x in load_file(path).items()}
    expected = load_file(tmp_path / "dense" / "model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], expected[key]) for key in expected)


def test_only_an_export_that_is_sparse_is_exported_again(tmp_path, capsys):
    export_model(patched(), tmp_path / "sparse")
    tensors = load_file(tmp_path / "sparse" / "model.safetensors")
    tensors[f"{UP}.weight"] += 1
    save_file(tensors, tmp_path / "sparse" / "model.safetensors", {"format": "pt"})
    model = patched()
    set_phase(model, "dense")
    export_model(model, tmp_path / "dense")
    for name, message in (("sparse", f"{UP}.weight is not 2:4"), ("dense", "lists no sparse weights")):
        assert main(["export", str(tmp_path / name), str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_rescued_model_trains_on_with_its_zeros(tmp_path):
    """By the settings that the manifest has."""
    write_bitmask(prune(zoo.build("llama")), tmp_path / "source")
    main(["convert", str(tmp_path / "source"), str(tmp_path / "out")])
    config = json.loads((tmp_path / "out" / "sparse24.json").read_text())["config"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    patch_model(model, Sparse24Config.from_dict(config))
    weights = sparse_weights(model)
    expected = prune(zoo.build("llama"))
    assert len(weights) == 14
    assert all(torch.equal(weight.merged(), expected.get_parameter(name)) for name, weight in weights.items())


def test_sizes_of_the_bitmasks_and_their_bits(tmp_path):
    """By hand, as the two writers of these tests might share a mistake."""
    values = torch.arange(1.0, 7.0).view(1, 6)
    mask = torch.tensor([[0b1001_0011, 0b1100]], dtype=torch.uint8)
    expected = [[1.0, 2.0, 0, 0, 3.0, 0, 0, 4.0, 0, 0, 5.0, 6.0]]
    assert library.decompress("x", values, mask).tolist() == expected
    for wrong in ([0b1001_0011, 0b1_1100], [0b1001_0111, 0b1100], [0b1001_0010, 0b1100]):
        with pytest.raises(ValueError, match=r"x: its bitmask does not keep two of each four"):
            library.decompress("x", values, torch.tensor([wrong], dtype=torch.uint8))


def flip(x):
    x.view(-1)[3] ^= 1
    return x


def with_nan(x):
    x.view(-1)[3] = torch.nan
    return x


DAMAGE = {
    "mask": ({"bitmask": flip}, f"{UP}: its bitmask does not keep two of each four"),
    "NaN": ({"compressed": with_nan}, f"{UP} has NaN or inf"),
    "absent": ({"bitmask": None}, f"{UP}: the files lack {UP}.bitmask"),
    "twice": ({"weight": lambda _: torch.ones(64, 32)}, f"{UP}: the files have {UP}.weight too"),
    "rows": ({"compressed": lambda x: x[1:].clone()}, r"these do not fit each other: compressed (63, 16), bitmask"),
    "dtype": ({"bitmask": lambda x: x.int()}, "bitmask torch.int32 (64, 4)"),
    "shape": ({"shape": lambda x: x.flip(0)}, "shape [32, 64]"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_tensor_is_refused_by_name_and_nothing_written(case, tmp_path, capsys):
    source, earlier = tmp_path / "source", tmp_path / "earlier"
    tensors = write_bitmask(prune(zoo.build("llama")), source)
    changes, message = DAMAGE[case]
    for part, change in changes.items():
        key = f"{UP}.{part}"
        value = None if change is None else change(tensors.get(key))
        tensors.pop(key, None)
        if value is not None:
            tensors[key] = value
    write_files(source, tensors)
    export_model(patched(), earlier)
    before = read(earlier)
    assert main(["convert", str(source), str(earlier)]) == 2
    said = capsys.readouterr().err
    assert message in said and f"{source / 'model.safetensors'}: {UP}" in said
    assert main(["convert", str(source), str(tmp_path / "new")]) == 2
    assert read(earlier) == before and not (tmp_path / "new").exists()


def test_damaged_files(tmp_path, capsys):
    source, out = tmp_path / "source", tmp_path / "out"
    tensors = write_bitmask(prune(zoo.build("llama")), source, size="20KB")

    def refused(*messages):
        assert main(["convert", str(source), str(out)]) == 2
        said = capsys.readouterr().err
        assert all(message in said for message in messages) and not out.exists()

    first = min(source.glob("*.safetensors"))
    data = first.read_bytes()
    first.write_bytes(data[:-10])
    refused(str(first), "damaged or cut short")
    first.unlink()
    refused(str(first))
    first.write_bytes(data)
    with_nan(tensors["model.norm.weight"])
    write_files(source, tensors)
    refused("model.safetensors: model.norm.weight has NaN or inf")


def as_weight(tensors):
    for part in ("compressed", "bitmask", "shape"):
        tensors[f"{UP}.weight.{part}"] = tensors.pop(f"{UP}.{part}")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", lambda tensors: tensors.pop("model.norm.weight"), "it lacks model.norm.weight"),
        ("llama", as_weight, f"it lacks {UP}.weight"),
        ("llama", lambda tensors: tensors.update(x=torch.ones(1)), "x is no tensor of its model"),
        ("llama", lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}), "model.norm.weight has other"),
        ("mixtral", lambda tensors: tensors.pop(max(key for key in tensors if "experts" in key)), "the above report"),
    ],
)
def test_tensors_that_are_not_the_models(name, change, message, tmp_path, capsys):
    tensors = write_bitmask(prune(zoo.build(name)), tmp_path / "source", ignore="experts")
    change(tensors)
    write_files(tmp_path / "source", tensors)
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has no sparsity_config of compressed-tensors, so there is nothing to convert"),
        ({"sparsity_config": SPARSITY | {"format": "sparse-bitmask"}}, "have the format 'sparse-bitmask'; only"),
        ({"sparsity_config": {"format": "dense"}, "format": "marlin-24"}, "have the format 'marlin-24'; only"),
        ({"sparsity_config": SPARSITY}, "has no weights in sparse-24-bitmask"),
    ],
)
def test_other_formats_are_refused_by_name(fields, message, tmp_path, capsys):
    prune(zoo.build("llama")).save_pretrained(tmp_path / "source")
    set_quantization(tmp_path / "source", **fields)
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_leftover_of_a_dense_checkpoint_is_removed_and_all_else_kept(key, tmp_path):
    model = prune(zoo.build("llama"))
    source, out = tmp_path / "source", tmp_path / "out"
    model.save_pretrained(source)
    before = json.loads((source / "config.json").read_text())
    leftover = {"sparsity_config": SPARSITY | {"format": "dense"}, "quant_method": "compressed-tensors"}
    (source / "config.json").write_text(json.dumps(before | {key: leftover}))
    assert main(["convert", str(source), str(out)]) == 0
    assert json.loads((out / "config.json").read_text()) == before
    model.save_pretrained(source)
    assert_same(out, source)


def test_a_config_that_does_not_fit_and_an_empty_destination(tmp_path, capsys, monkeypatch):
    source, out = tmp_path / "source", tmp_path / "out"
    write_bitmask(prune(zoo.build("llama")), source)

    def refused(message, to=out):
        assert main(["convert", str(source), str(to)]) == 2
        assert message in capsys.readouterr().err and not out.exists()

    monkeypatch.chdir(tmp_path)
    refused("the directory to write to is empty", to="")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    set_quantization(source, sparsity_config=SPARSITY | {"format": "dense"})
    refused(f"it lacks {UP.replace('1', '0').replace('up', 'down')}.weight")
    (source / "config.json").write_text("null")
    refused("config.json")


def test_a_mixture_of_experts_is_rescued(tmp_path):
    """Transformers stacks its experts when it loads them."""
    model = prune(zoo.build("mixtral"))
    write_bitmask(model, tmp_path / "source")
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "out")]) == 0
    model.save_pretrained(tmp_path / "dense")
    assert_same(tmp_path / "out", tmp_path / "dense")


def test_what_is_in_the_way_and_an_interruption(tmp_path, capsys, monkeypatch):
    source, out = tmp_path / "source", tmp_path / "out"
    write_bitmask(prune(zoo.build("llama")), source)
    before = read(source)
    assert main(["convert", str(source), str(source)]) == 2
    assert "another model that is no export" in capsys.readouterr().err
    assert read(source) == before
    for command in (["verify", str(source)], ["export", str(source), str(out)]):
        assert main(command) == 2
        assert "hf-sparse24 convert" in capsys.readouterr().err
    decompress, calls = library.decompress, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return decompress(*arguments)

    monkeypatch.setattr(library, "decompress", interrupted)
    assert main(["convert", str(source), str(out)]) == 130
    assert not out.exists()
    monkeypatch.undo()
    assert main(["convert", str(source), str(out)]) == 0
    assert main(["convert", str(source), str(out), "--max-shard-size", "20KB"]) == 0  # an export gives way
    assert not (out / "model.safetensors").exists()


@pytest.mark.slow
def test_what_the_release_writes(tmp_path):
    """The last release that has the format, from PyPI, writes what the writer of these tests does, and FP8 values."""
    bitmask.install_release(tmp_path / "packages")
    model = prune(zoo.build("llama")).bfloat16()
    model.save_pretrained(tmp_path / "dense")
    for kind in ("float", "fp8"):
        paths = [str(tmp_path / name) for name in ("packages", "dense", kind)]
        subprocess.run([sys.executable, bitmask.__file__, *paths, kind], check=True, capture_output=True)
        assert main(["convert", paths[2], str(tmp_path / f"out-{kind}")]) == 0
    assert_same(tmp_path / "out-float", tmp_path / "dense")
    written = load_file(tmp_path / "float" / "model.safetensors")
    expected = write_bitmask(model, tmp_path / "own")
    assert written.keys() == expected.keys() and all(torch.equal(written[key], expected[key]) for key in expected)
    assert main(["verify", str(tmp_path / "out-fp8")]) == 0
    tensors = load_file(tmp_path / "out-fp8" / "model.safetensors")
    weight, scale = tensors[f"{UP}.weight"], tensors[f"{UP}.weight_scale"]
    original = model.get_parameter(f"{UP}.weight").data
    assert weight.dtype == torch.float8_e4m3fn
    assert ((weight.float() * scale.float() - original).abs() <= original.abs().amax(1, keepdim=True) / 16).all()
    config = json.loads((tmp_path / "out-fp8" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "float-quantized" and "sparsity_config" not in config
