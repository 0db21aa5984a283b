"""Write a safetensors file one tensor at a time, which the safetensors library cannot: it wants all in memory.

The format (github.com/huggingface/safetensors): eight bytes with the length of a header, little-endian; the header,
JSON with each tensor's dtype, shape and place; the tensors' bytes one behind the other.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_CHUNK = 1 << 24
"""Bytes that are copied from a device, and written, at once."""


class Hashes(NamedTuple):
    """sha256 of a file's header, which says what lies where, and of the whole file."""

    header: str
    file: str


def write_safetensors(
    path: Path, like: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str]
) -> Hashes:
    """Write tensors as they come.

    Args:
        like: by name, tensors on the meta device with the dtypes and shapes to be written, in the order in which
            `tensors` brings them.
        tensors: names and tensors, on any device, each written and forgotten before the next one is made.
        metadata: strings for the header.

    Raises:
        ValueError: a tensor that is not as described, or one too few.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in like.items():
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligned, so that a reader can map the first tensor
    names = iter(like.items())
    digest = hashlib.sha256()
    with open(path, "wb") as file:

        def write(data) -> None:
            digest.update(data)
            file.write(data)

        write(len(text).to_bytes(8, "little"))
        write(text)
        for name, tensor in tensors:
            expected, described = next(names, ("nothing", tensor))
            if name != expected or (tensor.dtype, tensor.shape) != (described.dtype, described.shape):
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}, where {expected} was to come, "
                    f"{described.dtype} {tuple(described.shape)}"
                )
            flat = tensor.detach().contiguous().view(-1)
            flat = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
            for start in range(0, len(flat), _CHUNK):
                write(flat[start : start + _CHUNK].cpu().numpy().data)
        missing = [name for name, _ in names]
        if missing:
            raise ValueError(f"these tensors were described, and not written: {missing}")
    return Hashes(hashlib.sha256(text).hexdigest(), digest.hexdigest())


def header_hash(path: str | os.PathLike) -> str:
    """sha256 of a file's header.

    Raises:
        OSError: the file is too short to have the header that it speaks of.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > os.path.getsize(path):
            raise OSError(f"{path} is damaged or cut short; copy or download it again")
        return hashlib.sha256(file.read(length)).hexdigest()


def file_hash(path: str | os.PathLike) -> str:
    """sha256 of a whole file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
