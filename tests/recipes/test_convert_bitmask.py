"""recipes/convert_bitmask.py: sparse-24-bitmask checkpoints become dense ones, and damaged ones nothing."""

import convert_bitmask
import pytest
import torch
import zoo
from bitmask import SPARSITY, prune, set_quantization, write_bitmask, write_files
from safetensors.torch import load_file
from sparse_models import logits
from transformers import AutoModelForCausalLM

UP = "model.layers.1.mlp.up_proj"


def refused(source, out, message, capsys):
    assert convert_bitmask.main([str(source), str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists() and not list(out.parent.glob("*.part"))


@pytest.mark.usefixtures("dense_math")
@pytest.mark.parametrize(
    ("name", "sizes", "dtype", "layout"),
    [
        ("llama", {}, torch.bfloat16, {}),
        ("llama", {"tie_word_embeddings": True}, torch.float16, {"size": "8KB"}),
        ("qwen2", {}, torch.float32, {"ignore": "layers.0."}),
        ("llama", {"intermediate_size": 60}, torch.bfloat16, {}),  # half a byte of each row's bitmask is unused
        ("llama", {}, torch.bfloat16, {"suffix": ""}),  # NAME.weight.bitmask
        ("qwen2", {}, torch.float32, {"suffix": "", "size": "8KB", "ignore": "layers.0."}),
        ("mixtral", {}, torch.float32, {}),  # Transformers stacks its experts when it loads them
    ],
)
def test_the_same_weights_bit_for_bit(name, sizes, dtype, layout, tmp_path):
    model = prune(zoo.build(name, **sizes)).to(dtype)
    source, out = tmp_path / "source", tmp_path / "out"
    write_bitmask(model, source, **layout)
    (source / "tokenizer.json").write_text("{}")
    assert convert_bitmask.main([str(source), str(out)]) == 0
    model.save_pretrained(tmp_path / "dense")
    expected = load_file(tmp_path / "dense" / "model.safetensors")
    tensors = {key: x for path in out.glob("*.safetensors") for key, x in load_file(path).items()}
    assert tensors.keys() == expected.keys() and all(torch.equal(tensors[key], x) for key, x in expected.items())
    loaded, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(logits(loaded), logits(AutoModelForCausalLM.from_pretrained(tmp_path / "dense")))
    assert (out / "tokenizer.json").exists() and (out / "generation_config.json").exists()


def test_bits_of_a_bitmask():
    """By hand: the two writers of these tests could share a mistake."""
    values = torch.arange(1.0, 7.0).view(1, 6)
    mask = torch.tensor([[0b1001_0011, 0b1100]], dtype=torch.uint8)
    expected = [[1.0, 2.0, 0, 0, 3.0, 0, 0, 4.0, 0, 0, 5.0, 6.0]]
    assert convert_bitmask.decompress("x", values, mask).tolist() == expected
    for wrong in ([0b1001_0011, 0b1_1100], [0b1001_0111, 0b1100], [0b1001_0010, 0b1100]):
        with pytest.raises(ValueError, match="x: its bitmask"):
            convert_bitmask.decompress("x", values, torch.tensor([wrong], dtype=torch.uint8))


def flip(x):
    x.view(-1)[3] ^= 1
    return x


def with_nan(x):
    x.view(-1)[3] = torch.nan
    return x


DAMAGE = {
    "mask": (f"{UP}.bitmask", flip, f"{UP}: its bitmask does not keep two"),
    "NaN": (f"{UP}.compressed", with_nan, f"{UP} has NaN or inf"),
    "absent": (f"{UP}.bitmask", None, f"{UP}: the files lack {UP}.bitmask"),
    "twice": (f"{UP}.weight", lambda _: torch.ones(64, 32), f"{UP}: the files have {UP}.weight too"),
    "two names": (f"{UP}.weight.bitmask", lambda _: torch.ones(64, 4), f"{UP}: the files have {UP}.weight.bitmask too"),
    "dtype": (f"{UP}.bitmask", lambda x: x.int(), "bitmask torch.int32 (64, 4)"),
    "shape": (f"{UP}.shape", lambda x: x.flip(0), "shape [[32], [64]]"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_tensor_is_refused_by_name_and_nothing_written(case, tmp_path, capsys):
    tensors = write_bitmask(prune(zoo.build("llama")), tmp_path / "source")
    name, change, message = DAMAGE[case]
    found = tensors.pop(name, None)
    if change is not None:
        tensors[name] = change(found)
    write_files(tmp_path / "source", tensors)
    refused(tmp_path / "source", tmp_path / "out", message, capsys)


def test_a_file_that_ends_early_and_a_directory_in_the_way(tmp_path, capsys):
    source, out = tmp_path / "source", tmp_path / "out"
    write_bitmask(prune(zoo.build("llama")), source, size="20KB")
    first = min(source.glob("*.safetensors"))
    data = first.read_bytes()
    first.write_bytes(data[:-10])
    refused(source, out, "damaged or cut short", capsys)
    first.write_bytes(data)
    assert convert_bitmask.main([str(source), str(source)]) == 2
    assert f"{source} exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has no sparsity_config of compressed-tensors"),
        ({"sparsity_config": SPARSITY | {"format": "sparse-bitmask"}}, "the format 'sparse-bitmask'; only"),
        ({"sparsity_config": {"format": "dense"}, "format": "marlin-24"}, "the format 'marlin-24'; only"),
        ({"sparsity_config": SPARSITY}, "has no weights in sparse-24-bitmask"),
    ],
)
def test_other_formats_are_refused_by_name(fields, message, tmp_path, capsys):
    zoo.build("llama").save_pretrained(tmp_path / "source")
    set_quantization(tmp_path / "source", **fields)
    refused(tmp_path / "source", tmp_path / "out", message, capsys)
