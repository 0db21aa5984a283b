"""read_listing says which weights of a checkpoint on disk are sparse, and verify reads them to prove it.

`export_model` writes `sparse24.json` with the weights: which tensors are sparse, and the hash of every file. A packed
model that was loaded and saved again has its packed weights listed in `config.json`.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sparse24_kernels import Packed, Pattern, unpack_nm
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..files import read_json
from ..metrics import all_finite, is_nm_sparse
from ..packed_format import PACKED_INDEX, PACKED_WEIGHTS, PackedFormat, buffer_names, packed_weight_name
from ..tables import shown
from ..weights.packed_weight import wrong_packed
from .replacing import CONFIG
from .safetensors_file import DTYPES, open_safetensors

MANIFEST = "sparse24.json"
SparseGroups = dict[str, tuple[int, Pattern]]
"""The dimension, -1 or -2, and the pattern of the groups of each sparse tensor, by its name in the files."""
_TORCH_DTYPES = {text: dtype for dtype, text in DTYPES.items()}


class Listing(NamedTuple):
    """Which weights a checkpoint lists as sparse."""

    format: str  # "dense" or "packed"
    source: str  # the name of the file that says it
    weights: dict[str, int]  # the dimension of the groups, -1 or -2, by the name of the (dense) weight
    files: dict[str, str]  # sha256 of each safetensors file by name; empty where they were not recorded
    pattern: Pattern
    patterns: dict[str, Pattern]  # of the weights that have another pattern than most, by name
    method: str | None

    @property
    def all_patterns(self) -> str:
        """The patterns of its weights as text: `"2:4"`, or `"2:4 and 1:4"`."""
        found = (str(self.patterns.get(name, self.pattern)) for name in self.weights)
        return " and ".join(dict.fromkeys(found)) or str(self.pattern)


class Finding(NamedTuple):
    """One check's result. For a file, `elements` is 0; `problem` is None where nothing is wrong."""

    name: str
    elements: int
    zeros: int
    problem: str | None


class Tensors:
    """The tensors in a directory's safetensors files, read on request. OSError: a file is damaged or missing."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.files: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        for path in weight_files(directory):
            self.files[path.name] = open_safetensors(path)
            self.names |= dict.fromkeys(self.files[path.name].keys(), path.name)
        if not self.names:
            raise OSError(f"{directory} has no safetensors files")

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def size(self, name: str) -> tuple[int, int]:
        """Elements and bytes of a tensor, of any dtype. ValueError: no file has it."""
        if name not in self.names:
            raise ValueError(f"{self.directory}: its safetensors files lack {name}; copy or download the whole again")
        part = self.files[self.names[name]].get_slice(name)
        elements, bits = math.prod(part.get_shape()), re.search(r"\d+", part.get_dtype())
        return elements, elements * (8 if bits is None else int(bits[0])) // 8  # BOOL is one byte

    def like(self, name: str) -> Tensor:
        """A meta tensor of the same dtype and shape. ValueError: a dtype of less than a byte, such as F4."""
        part = self.files[self.names[name]].get_slice(name)
        dtype = _TORCH_DTYPES.get(part.get_dtype())
        if dtype is None:
            raise ValueError(f"{self.directory / self.names[name]}: {name} is {part.get_dtype()}, which is not read")
        return torch.empty(part.get_shape(), dtype=dtype, device="meta")

    def read(self, name: str) -> Tensor:
        self.like(name)  # or its error
        return self.files[self.names[name]].get_tensor(name)


def weight_files(directory: Path) -> list[Path]:
    """The files that `from_pretrained` would load."""
    config = read_json(directory / CONFIG) if (directory / CONFIG).exists() else {}
    is_packed = "transformers_weights" in config  # as in the quantizer; older ones, and those saved again, do not
    single, several = (PACKED_WEIGHTS, PACKED_INDEX) if is_packed else (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    index = directory / several
    if (directory / single).exists() or not index.exists():
        return sorted(directory.glob(single))
    files = read_json(index).get("weight_map")
    names: list[Any] = list(files.values()) if isinstance(files, dict) else [None]
    if not all(isinstance(name, str) and name == Path(name).name != "" for name in names):
        raise ValueError(f"{index} must have a weight_map from tensors to files in its directory")
    return [directory / name for name in sorted(set(names))]


def read_listing(tensors: Tensors) -> Listing:
    """Which weights the checkpoint that has these tensors lists as sparse. ValueError: a training checkpoint, one that
    lists no sparse weights, or a damaged file. OSError: no config.json."""
    directory = tensors.directory
    config = read_json(directory / CONFIG).get("quantization_config") or {}
    if not isinstance(config, dict):
        raise ValueError(f"{directory / CONFIG}: quantization_config={shown(config)}: must be a dict")
    is_ours = config.get("quant_method") == "sparse24"
    if is_ours and "packed" not in config:
        raise ValueError(f"{directory} is a training checkpoint, with dense weights; export it with hf-sparse24 export")
    try:
        said = PackedFormat.from_dict(config["packed"]) if is_ours else None
        packed = said.weights if said else {}
        pattern = Pattern.parse(config.get("pattern", "2:4") if is_ours else "2:4")
    except ValueError as error:
        raise ValueError(f"{directory / CONFIG}: {error}") from error
    listing = None
    if (directory / MANIFEST).exists():
        listing = _read_manifest(directory / MANIFEST)
        if listing.files and tensors.files.keys() != listing.files.keys():
            if not packed:
                files = f"lists {sorted(listing.files)}, and from_pretrained reads {sorted(tensors.files)}"
                raise ValueError(
                    f"{directory / MANIFEST} {files}: another model replaced the export; remove {MANIFEST}"
                )
            listing = None  # a packed model was saved over it
    if listing is None and packed:
        listing = Listing("packed", CONFIG, dict.fromkeys(packed, -1), {}, pattern, dict(packed), config.get("method"))
    if listing is not None:
        stored = {weight for name in tensors.names if (weight := packed_weight_name(name))}
        expected = stored | {name for name in listing.weights if name not in tensors}
        wrong = min(expected ^ {*packed}, default=None)
        if (listing.format == "packed" or packed) and wrong is not None:
            way = "must list each packed weight, and no other; copy or download the whole export again"
            raise ValueError(f"{directory / CONFIG}: packed.weights has {wrong!r} wrong: it {way}")
        for name in sorted(stored):
            if said is not None and _values(tensors, name) not in (None, said.values):
                told = f"packed.values={said.values!r}, and {name} has {_values(tensors, name)} values"
                raise ValueError(f"{directory / CONFIG}: {told}; copy or download the whole export again")
        return listing
    way = "; recipes/convert_bitmask.py makes it dense" if "sparsity_config" in config else ""
    raise ValueError(f"{directory} has no {MANIFEST}, in which export_model lists the sparse weights{way}")


def _values(tensors: Tensors, name: str) -> str | None:
    """Which of `VALUES` a packed weight has; None where its parts are missing or contradict each other."""
    values, _, scales = buffer_names(name)
    is_int8 = values in tensors and tensors.like(values).dtype == torch.int8
    return None if values not in tensors or is_int8 != (scales in tensors) else "int8" if is_int8 else "float"


def write_manifest(directory: Path, format: str, sparse: SparseGroups, files: dict, config: dict[str, Any]) -> None:
    """Write `sparse24.json`: what a `Listing` has, and the `Sparse24Config` of the exported model as a dict."""
    weights = {name: dim for name, (dim, _) in sparse.items()}
    patterns = {name: str(pattern) for name, (_, pattern) in sparse.items() if str(pattern) != config["pattern"]}
    manifest: dict[str, Any] = {"format": format, "weights": weights, "files": files, "config": config}
    manifest |= {"patterns": patterns} if patterns else {}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _read_manifest(path: Path) -> Listing:
    values = read_json(path)
    try:
        format, weights, files, config = (values[key] for key in ("format", "weights", "files", "config"))
        patterns = {name: Pattern.parse(text) for name, text in values.get("patterns", {}).items()}
        pattern = Pattern.parse(config["pattern"])
        texts = (*files.values(), config["method"])
        if {*map(type, weights.values())} - {int} or {*weights.values()} - {-1, -2}:
            raise ValueError("weights has a dimension other than -1 and -2")
        if format not in ("dense", "packed") or {*map(type, texts)} != {str}:
            raise ValueError("format, method or a hash of files has a value that it cannot have")
        return Listing(format, MANIFEST, weights, files, pattern, patterns, config["method"])
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not what export_model writes ({error})") from error


def verify(listing: Listing, tensors: Tensors) -> Iterator[Finding]:
    """Yield a `Finding` for each listed file and weight, and read all of them."""
    for name, digest in listing.files.items():
        with open(tensors.directory / name, "rb") as file:
            is_same = hashlib.file_digest(file, "sha256").hexdigest() == digest
        yield Finding(name, 0, 0, None if is_same else "is not the file that was exported")
    for name, dim in listing.weights.items():
        is_packed = listing.format == "packed" and name not in tensors
        pattern = listing.patterns.get(name, listing.pattern)
        yield _verify_packed(tensors, name, pattern) if is_packed else _verify_dense(tensors, name, dim, pattern)


def _verify_packed(tensors: Tensors, name: str, pattern: Pattern) -> Finding:
    values, mask, scales = buffer_names(name)
    missing = [key for key in (values, mask) if key not in tensors]
    if missing:
        return Finding(name, 0, 0, f"{missing} not in the files")
    has_scales = scales in tensors
    packed = Packed(tensors.read(values), tensors.read(mask), tensors.read(scales) if has_scales else None, pattern.m)
    problem, elements = wrong_packed(packed), 8 * packed.mask.numel()
    zeros = elements - int((packed.values != 0).sum())
    if problem is None and pattern != packed.pattern and not is_nm_sparse(unpack_nm(packed), *pattern):
        problem = f"is not {pattern}"
    return Finding(name, elements, zeros, problem)


def _verify_dense(tensors: Tensors, name: str, dim: int, pattern: Pattern) -> Finding:
    if name not in tensors:
        return Finding(name, 0, 0, "not in the files")
    tensor = tensors.read(name)
    zeros = int((tensor == 0).sum())  # of FP8 values too, which count_nonzero does not take
    problem = None if _is_sparse(tensor, dim, pattern) else f"is not {pattern} along its input dimension"
    return Finding(name, tensor.numel(), zeros, problem if all_finite(tensor) else "has NaN or inf")


def sparse_dim(tensor: Tensor, expected: int, pattern: Pattern) -> int | None:
    """The dimension, -1 or -2, along which a tensor is sparse, None for neither; `expected` is tried first."""
    return next((dim for dim in (expected, -3 - expected) if _is_sparse(tensor, dim, pattern)), None)


def _is_sparse(tensor: Tensor, dim: int, pattern: Pattern) -> bool:
    return tensor.dim() > 1 and tensor.shape[dim] % pattern.m == 0 and is_nm_sparse(tensor, *pattern, dim)
