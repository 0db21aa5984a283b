"""What is sparse in a checkpoint on disk, and whether it is: `read_listing`, and `verify`, which reads every tensor.

`export_model` writes `sparse24.json` beside the weights: which tensors are sparse, and the hash of every file. In other
checkpoints, packed weights are listed in `config.json`, and dense tensors are looked at one by one.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from sparse24_kernels import Packed, Pattern
from torch import Tensor

from ..metrics import is_nm_sparse
from ..packed import PackedFormat, buffer_names, wrong_packed
from .replacing import CONFIG
from .safetensors_file import DTYPES, file_hash

MANIFEST = "sparse24.json"
_TORCH_DTYPES = {text: dtype for dtype, text in DTYPES.items()}
_CHUNK = 1 << 22
"""Elements that are looked at together."""


@dataclass(frozen=True)
class Manifest:
    """What `sparse24.json` says of an export.

    Attributes:
        format: `"dense"` or `"packed"`.
        weights: the dimension of the groups of each sparse tensor, -1 or -2, by name; packed ones by the name of the
            dense weight.
        files: sha256 of each safetensors file by name.
        config: the `Sparse24Config` of the model that was exported, as `to_dict` gives it.
    """

    format: str
    weights: dict[str, int]
    files: dict[str, str]
    config: dict[str, Any]

    def write(self, directory: Path) -> None:
        (directory / MANIFEST).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


class Listing(NamedTuple):
    """Which weights of a checkpoint are said to be sparse.

    Attributes:
        format: `"dense"` or `"packed"`.
        source: where that is said; `"tensors"` where nothing says it, and these were found to be sparse.
        weights: as in `Manifest`.
        files: as in `Manifest`; empty where nobody wrote them down.
        pattern: of the groups.
        method: how it was trained, None where that is not known.
    """

    format: str
    source: str
    weights: dict[str, int]
    files: dict[str, str]
    pattern: Pattern
    method: str | None


class Finding(NamedTuple):
    """One weight, or one file, which has no elements: how many are zero, and what is wrong with it, if anything."""

    name: str
    elements: int
    zeros: int
    problem: str | None


class Tensors:
    """The tensors of all safetensors files in a directory, read when asked for."""

    def __init__(self, directory: Path):
        self.files: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        for path in sorted(directory.glob("*.safetensors")):
            try:
                self.files[path.name] = safe_open(path, "pt")
            except SafetensorError as error:
                raise OSError(f"{path} is damaged or cut short ({error}); copy or download it again") from error
            self.names |= dict.fromkeys(self.files[path.name].keys(), path.name)
        if not self.names:
            raise OSError(f"{directory} has no safetensors files")

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def like(self, name: str) -> Tensor:
        """A tensor of the same dtype and shape on the meta device."""
        part = self.files[self.names[name]].get_slice(name)
        return torch.empty(part.get_shape(), dtype=_TORCH_DTYPES[part.get_dtype()], device="meta")

    def read(self, name: str) -> Tensor:
        return self.files[self.names[name]].get_tensor(name)

    def chunks(self, name: str) -> Iterator[Tensor]:
        """A tensor in pieces of whole rows."""
        rows = self.files[self.names[name]].get_slice(name)
        shape = rows.get_shape()
        step = max(1, _CHUNK // max(1, torch.Size(shape[1:]).numel()))
        for start in range(0, shape[0], step):
            yield rows[start : start + step]


def read_listing(directory: Path, tensors: Tensors) -> Listing:
    """Which weights the checkpoint in `directory` lists as sparse.

    Raises:
        ValueError: a training checkpoint, whose weights are the dense master weights; or a file that says nonsense.
        OSError: no config.json.
    """
    config = _read_json(directory / CONFIG).get("quantization_config") or {}
    method, pattern = config.get("method"), Pattern.parse(config.get("pattern", "2:4"))
    if (directory / MANIFEST).exists():
        saved = _read_json(directory / MANIFEST)
        try:
            manifest = Manifest(**saved)
            pattern = Pattern.parse(manifest.config["pattern"])
            method = manifest.config["method"]
            known = manifest.format in ("dense", "packed") and set(manifest.weights.values()) <= {-1, -2}
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{directory / MANIFEST} is not what export_model writes ({error})") from error
        if not known:
            raise ValueError(
                f"{directory / MANIFEST} is not what export_model writes: its format or a dimension is not"
            )
        return Listing(manifest.format, MANIFEST, manifest.weights, manifest.files, pattern, method)
    if config.get("quant_method") == "sparse24":
        if "packed" not in config:
            raise ValueError(
                f"{directory} is a training checkpoint: it has the dense master weights; export it "
                f"(hf-sparse24 export), and look at the export"
            )
        packed = PackedFormat.from_dict(config["packed"])
        return Listing("packed", CONFIG, dict.fromkeys(packed.weights, -1), {}, pattern, method)
    found = {name: dim for name in tensors.names if (dim := _found_dim(tensors, name, pattern)) is not None}
    return Listing("dense", "tensors", found, {}, pattern, method)


def verify(directory: str | os.PathLike, listing: Listing, tensors: Tensors) -> Iterator[Finding]:
    """Read every listed weight and every listed file of a checkpoint, and say what was found, one by one."""
    directory = Path(directory)
    for name, digest in listing.files.items():
        path = directory / name
        problem = None
        if not path.exists():
            problem = "is missing"
        elif file_hash(path) != digest:
            problem = "is not the file that was exported"
        yield Finding(name, 0, 0, problem)
    for name, dim in listing.weights.items():
        is_packed = listing.format == "packed" and name not in tensors
        yield _verify_packed(tensors, name) if is_packed else _verify_dense(tensors, name, dim, listing.pattern)


def _verify_packed(tensors: Tensors, name: str) -> Finding:
    missing = [key for key in buffer_names(name) if key not in tensors]
    if missing:
        return Finding(name, 0, 0, f"{missing} not in the files")
    packed = Packed(*(tensors.read(key) for key in buffer_names(name)))
    elements = 2 * packed.values.numel()
    zeros = elements - int(packed.values.count_nonzero())
    return Finding(name, elements, zeros, wrong_packed(packed))


def _verify_dense(tensors: Tensors, name: str, dim: int, pattern: Pattern) -> Finding:
    if name not in tensors:
        return Finding(name, 0, 0, "not in the files")
    elements = zeros = 0
    is_sparse = True
    for chunk in tensors.chunks(name) if dim == -1 else [tensors.read(name)]:
        elements += chunk.numel()
        zeros += chunk.numel() - int(chunk.count_nonzero())
        is_sparse = is_sparse and chunk.shape[dim] % pattern.m == 0 and is_nm_sparse(chunk, *pattern, dim)
    return Finding(name, elements, zeros, None if is_sparse else f"is not {pattern} along dimension {dim}")


def sparse_dim(tensor: Tensor, expected: int, pattern: Pattern) -> int | None:
    """The dimension, of the last two, along which a tensor is sparse; `expected` is tried first, None for neither."""
    for dim in (expected, -3 - expected):
        if tensor.dim() > 1 and tensor.shape[dim] % pattern.m == 0 and is_nm_sparse(tensor, *pattern, dim):
            return dim
    return None


def _found_dim(tensors: Tensors, name: str, pattern: Pattern) -> int | None:
    if tensors.like(name).dim() < 2 or not tensors.like(name).is_floating_point():
        return None
    first = next(tensors.chunks(name))
    if not bool(first.count_nonzero()):
        return None
    return sparse_dim(first, -1, pattern) and sparse_dim(tensors.read(name), -1, pattern)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return values
