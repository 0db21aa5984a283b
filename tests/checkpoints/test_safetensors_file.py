"""Files of safetensors with the mark of their export."""

import hashlib

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_sparse24.checkpoints.safetensors_file import DTYPES, MARK, read_headers, write_safetensors


def test_a_file_has_its_tensors_its_mark_and_the_hash_that_is_returned(tmp_path):
    tensors = {str(dtype): torch.randint(0, 2, (3, i + 1)).to(dtype) for i, dtype in enumerate(DTYPES)}
    tensors |= {"scalar": torch.tensor(2.0), "none": torch.ones(0, 4)}
    digest = write_safetensors(tmp_path / "x", tensors, "one")
    read = load_file(tmp_path / "x")
    assert {name: (x.dtype, x.shape) for name, x in read.items()} == {n: (x.dtype, x.shape) for n, x in tensors.items()}
    assert all(torch.equal(read[name].float(), x.float()) for name, x in tensors.items() if not x.is_complex())
    with safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata() == {"format": "pt", MARK: "one"}
    assert digest == hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest()


def test_headers(tmp_path):
    write_safetensors(tmp_path / "a", {"a": torch.ones(2)}, "one")
    save_file({"b": torch.ones(2)}, tmp_path / "b", {"format": "pt"})
    dtypes, marks = read_headers([tmp_path / "a", str(tmp_path / "b")])
    assert dtypes == {"a": "F32", "b": "F32"} and marks == {"a": "one", "b": None}
