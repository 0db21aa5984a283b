"""read_listing says which weights of a checkpoint on disk are sparse, and verify reads them to prove it."""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from sparse24_kernels import Packed, Pattern, unpack_nm
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..checkpoints.manifest import FORMATS, MANIFEST, SparseGroups, is_sparse
from ..checkpoints.packed_files import check_files
from ..checkpoints.replacing import CONFIG
from ..checkpoints.safetensors_file import DTYPES, open_safetensors
from ..files import read_json
from ..metrics import all_finite, is_nm_sparse
from ..packed_format import PACKED_INDEX, PackedFormat, buffer_names
from ..tables import shown
from ..weights.packed_weight import wrong_packed


class Listing(NamedTuple):
    """The weights that a checkpoint lists as sparse."""

    format: str  # "dense" or "packed"
    source: str  # the name of the file that says it
    weights: SparseGroups  # by the names in the dense model
    packed: Mapping[str, Pattern]  # those of them that are packed
    files: Mapping[str, str]  # sha256 of each safetensors file by name; empty where they were not recorded
    method: str | None

    @property
    def all_patterns(self) -> str:
        """The patterns of its weights as text: `"2:4"`, or `"1:4 and 2:4"`."""
        return " and ".join(map(str, sorted({pattern for _, pattern in self.weights.values()}))) or "sparse"


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

    def read(self, name: str) -> Tensor:
        """Return a tensor. ValueError: its elements are smaller than a byte, such as F4."""
        file = self.files[self.names[name]]
        if (dtype := file.get_slice(name).get_dtype()) not in DTYPES.values():
            raise ValueError(f"{self.directory / self.names[name]}: {name} is {dtype}, which is not read")
        return file.get_tensor(name)


def weight_files(directory: Path) -> list[Path]:
    """The files that `from_pretrained` would load."""
    config = read_json(directory / CONFIG) if (directory / CONFIG).exists() else {}
    is_export = "transformers_weights" in config  # a packed one, see the quantizer
    index, single = directory / (PACKED_INDEX if is_export else SAFE_WEIGHTS_INDEX_NAME), directory / SAFE_WEIGHTS_NAME
    if not index.exists() or (single.exists() and not is_export):
        return [] if is_export or not single.exists() else [single]
    files = read_json(index).get("weight_map")
    names: list[Any] = list(files.values()) if isinstance(files, dict) else [None]
    if not all(isinstance(name, str) and name == Path(name).name != "" for name in names):
        raise ValueError(f"{index} must have a weight_map from tensors to files in its directory")
    return [directory / name for name in sorted(set(names))]


def read_listing(tensors: Tensors) -> Listing:
    """The weights that the checkpoint of these tensors lists as sparse. ValueError: a training checkpoint, one that
    lists no sparse weights, or a damaged file. OSError: no config.json."""
    directory = tensors.directory
    config = read_json(directory / CONFIG).get("quantization_config") or {}
    if not isinstance(config, dict):
        raise ValueError(f"{directory / CONFIG}: quantization_config={shown(config)}: must be a dict")
    is_ours = config.get("quant_method") == "sparse24"
    if is_ours and "packed" not in config:
        raise ValueError(f"{directory} is a training checkpoint, with dense weights; export it with hf-sparse24 export")
    try:
        packed = PackedFormat.from_dict(config["packed"]) if is_ours else PackedFormat({})
        check_files(packed, [directory / name for name in tensors.files])
    except ValueError as error:
        raise ValueError(f"{directory / CONFIG}: {error}") from error
    weights: SparseGroups = {name: (-1, pattern) for name, pattern in packed.weights.items()}
    if not (directory / MANIFEST).exists():
        if is_ours:
            return Listing("packed", CONFIG, weights, packed.weights, {}, config.get("method"))
        way = "; recipes/convert_bitmask.py makes it dense" if "sparsity_config" in config else ""
        raise ValueError(f"{directory} has no {MANIFEST}, in which export_model lists the sparse weights{way}")
    listed = _read_manifest(directory / MANIFEST)
    if tensors.files.keys() != listed.files.keys():
        files = f"lists {sorted(listed.files)}, and from_pretrained reads {sorted(tensors.files)}"
        raise ValueError(f"{directory / MANIFEST} {files}: another model replaced the export; remove {MANIFEST}")
    source = CONFIG if is_ours else MANIFEST
    return listed._replace(source=source, weights=weights | listed.weights, packed=packed.weights)


def _read_manifest(path: Path) -> Listing:
    values = read_json(path)
    try:
        format, dims, files, config = (values[key] for key in ("format", "weights", "files", "config"))
        patterns = {name: Pattern.parse(text) for name, text in values.get("patterns", {}).items()}
        pattern = Pattern.parse(config["pattern"])
        texts = (*files.values(), config["method"])
        if {*map(type, dims.values())} - {int} or {*dims.values()} - {-1, -2}:
            raise ValueError("weights has a dimension other than -1 and -2")
        if format not in FORMATS or {*map(type, texts)} != {str}:
            raise ValueError("format, method or a hash of files has a value that it cannot have")
        weights = {name: (dim, patterns.get(name, pattern)) for name, dim in dims.items()}
        return Listing(format, MANIFEST, weights, {}, files, config["method"])
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not what export_model writes ({error})") from error


def verify(listing: Listing, tensors: Tensors) -> Iterator[Finding]:
    """Yield a `Finding` for each listed file and weight, and read all of them."""
    for name, digest in listing.files.items():
        with open(tensors.directory / name, "rb") as file:
            is_same = hashlib.file_digest(file, "sha256").hexdigest() == digest
        yield Finding(name, 0, 0, None if is_same else "is not the file that was exported")
    for name, (dim, pattern) in listing.weights.items():
        is_packed = name in listing.packed
        yield _verify_packed(tensors, name, pattern) if is_packed else _verify_dense(tensors, name, dim, pattern)


def _verify_packed(tensors: Tensors, name: str, pattern: Pattern) -> Finding:
    values, mask, scales = (tensors.read(key) if key in tensors else None for key in buffer_names(name))
    packed = Packed(cast(Tensor, values), cast(Tensor, mask), scales, pattern.m)  # read_listing has found them
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
    problem = None if is_sparse(tensor, dim, pattern) else f"is not {pattern} along its input dimension"
    return Finding(name, tensor.numel(), zeros, problem if all_finite(tensor) else "has NaN or inf")
