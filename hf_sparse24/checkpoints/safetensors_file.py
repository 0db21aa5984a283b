"""Files of safetensors: written with the mark of their export, and the headers of those that are read."""

import hashlib
import json
import os
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.modeling_utils import str_to_torch_dtype

DTYPES = {dtype: text for text, dtype in str_to_torch_dtype.items()}
DTYPES |= {torch.float8_e8m0fnu: "F8_E8M0", torch.complex64: "C64"}  # which Transformers does not load
MARK = "hf_sparse24_export"  # the key of the file's export in the header's metadata; two exports have other values


def write_safetensors(path: Path, tensors: dict[str, Tensor], mark: str) -> str:
    """Write contiguous tensors of the CPU to a file, and return its sha256.

    The same tensors give the same bytes: the library's `save_file` writes metadata in any order. The format
    (github.com/huggingface/safetensors): eight bytes with the length of a header, little-endian; the header, JSON with
    each tensor's dtype, shape and place; the tensors' bytes one behind the other.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", MARK: mark}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligned, so that a reader can map the first tensor
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        flat = (x.view(-1).view(torch.uint8).numpy().tobytes() for x in tensors.values() if x.numel())
        for part in chain([len(text).to_bytes(8, "little"), text], flat):
            digest.update(part)
            file.write(part)
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
