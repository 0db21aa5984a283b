"""The streaming writer against the safetensors library, which reads what it writes."""

import hashlib
import weakref

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hf_sparse24.checkpoints.safetensors_file import DTYPES, MARK, read_headers, write_safetensors


def like(tensors):
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}


def test_every_dtype_and_odd_shapes(tmp_path):
    tensors = {}
    for i, dtype in enumerate(DTYPES):
        x = torch.randint(0, 2, (3, i + 1)).to(dtype)
        tensors |= {f"{dtype}": x, f"{dtype} transposed": x.t(), f"{dtype} scalar": x[0, 0], f"{dtype} none": x[:0]}
    digest = write_safetensors(tmp_path / "x.safetensors", like(tensors), tensors.items(), {"format": "pt", "a": "b"})
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
        assert (
            read[name].contiguous().flatten().view(torch.uint8).equal(tensor.contiguous().flatten().view(torch.uint8))
        )
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "a": "b"}
    assert digest == hashlib.sha256((tmp_path / "x.safetensors").read_bytes()).hexdigest()


def test_headers(tmp_path):
    for name, metadata in (("a", {MARK: "one"}), ("b", {"format": "pt"})):
        write_safetensors(tmp_path / name, like({name: torch.ones(2)}), [(name, torch.ones(2))], metadata)
    dtypes, marks = read_headers([tmp_path / "a", str(tmp_path / "b")])
    assert dtypes == {"a": "F32", "b": "F32"} and marks == {"a": "one", "b": None}


def test_more_than_a_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_sparse24.checkpoints.safetensors_file._CHUNK", 64)
    tensors = {"x": torch.randn(7, 13), "y": torch.arange(1000)}
    write_safetensors(tmp_path / "x.safetensors", like(tensors), tensors.items(), {})
    assert all(torch.equal(load_file(tmp_path / "x.safetensors")[name], x) for name, x in tensors.items())


def test_a_tensor_is_released_when_the_next_one_is_there(tmp_path):
    alive, most = weakref.WeakSet(), []

    def make():
        for name in "abcd":
            most.append(len(alive))
            tensor = torch.ones(4)
            alive.add(tensor)
            yield name, tensor
            del tensor

    described = {name: torch.empty(4, device="meta") for name in "abcd"}
    write_safetensors(tmp_path / "x.safetensors", described, make(), {})
    assert most == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("a", torch.ones(3))], r"a is torch.float32 \(3,\), where a was to come"),
        ([("a", torch.ones(4, dtype=torch.float64))], "a is torch.float64"),
        ([("b", torch.ones(4))], "where a was to come"),
        ([("a", torch.ones(4))], "argument 2 is shorter"),
        ([("a", torch.ones(4)), ("b", torch.ones(4)), ("c", torch.ones(4))], "argument 2 is longer"),
    ],
)
def test_tensors_that_are_not_as_described(tensors, message, tmp_path):
    described = {name: torch.empty(4, device="meta") for name in "ab"}
    with pytest.raises(ValueError, match=message):
        write_safetensors(tmp_path / "x.safetensors", described, tensors, {})
