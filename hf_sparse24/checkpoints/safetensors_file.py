"""A writer of safetensors files that has one tensor in memory at a time.

The library's `save_file` takes all tensors of a file at once, and an export computes them: it would need the memory of
a second model. The format (github.com/huggingface/safetensors): eight bytes with the length of a header, little-endian;
the header, JSON with each tensor's dtype, shape and place; the tensors' bytes one behind the other.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.modeling_utils import str_to_torch_dtype

DTYPES = {dtype: text for text, dtype in str_to_torch_dtype.items()}
DTYPES |= {torch.float8_e8m0fnu: "F8_E8M0", torch.complex64: "C64"}  # which Transformers does not load
MARK = "hf_sparse24_export"
"""The key, in a header's metadata, of the export that the file belongs to; its value differs between two exports."""

_CHUNK = 1 << 24  # bytes that are copied from a device, and written, at once


def write_safetensors(
    path: Path, like: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str]
) -> str:
    """Write a file and return its sha256. `like` has meta tensors of the dtypes and shapes to come, in the same order.

    Each tensor is released when the next one is there. ValueError: one is not as described.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in like.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligned, so that a reader can map the first tensor
    digest = hashlib.sha256()
    with open(path, "wb") as file:

        def write(data) -> None:
            digest.update(data)
            file.write(data)

        write(len(text).to_bytes(8, "little"))
        write(text)
        for (expected, form), (name, tensor) in zip(like.items(), tensors, strict=True):
            if (name, tensor.dtype, tensor.shape) != (expected, form.dtype, form.shape):
                raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, where {expected} was to come")
            flat = tensor.detach().contiguous().view(-1)
            flat = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
            for chunk in flat.split(_CHUNK):
                write(chunk.cpu().numpy().data)
    return digest.hexdigest()


def open_safetensors(path: str | os.PathLike) -> safe_open:
    """The open file, as `safe_open` gives it. OSError: it is damaged; safetensors does not say which shard is."""
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise OSError(f"{path} is damaged or cut short ({error}); copy or download it again") from error


def read_headers(files: Iterable[str | Path]) -> tuple[dict[str, str], dict[str, str | None]]:
    """The dtype of every tensor by its name, and the `MARK` of every file by the file's name."""
    dtypes: dict[str, str] = {}
    marks: dict[str, str | None] = {}
    for file in files:
        opened = open_safetensors(file)
        dtypes |= {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118  not a dict
        marks[os.path.basename(file)] = (opened.metadata() or {}).get(MARK)
    return dtypes, marks
