"""`sparse24.json`, which an export has with its weights: the sha256 of every file, and the sparse weights stored dense.

One record says each thing. `config.json` of a packed model lists its packed weights, and names the export that the
header of every file names too: loading compares these. `hf-sparse24 verify` compares what `sparse24.json` says.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from sparse24_kernels import Pattern
from torch import Tensor

from ..metrics import is_nm_sparse

MANIFEST = "sparse24.json"
FORMATS = ("dense", "packed")
SparseGroups = dict[str, tuple[int, Pattern]]  # dimension of the groups (-1 or -2) and N:M of each tensor in the files


def write_manifest(
    directory: Path, format: str, sparse: SparseGroups, files: Mapping[str, str], config: Mapping[str, object]
) -> None:
    """Write `sparse24.json`: the groups of the sparse weights that are stored dense, the sha256 of each file by its
    name, and the `Sparse24Config` of the exported model as a dict."""
    weights = {name: dim for name, (dim, _) in sparse.items()}
    patterns = {name: str(pattern) for name, (_, pattern) in sparse.items() if str(pattern) != config["pattern"]}
    manifest: dict[str, object] = {"format": format, "weights": weights, "files": files, "config": config}
    manifest |= {"patterns": patterns} if patterns else {}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def sparse_dim(tensor: Tensor, expected: int, pattern: Pattern) -> int | None:
    """The dimension, -1 or -2, along which a tensor is sparse, None for neither; `expected` is tried first."""
    return next((dim for dim in (expected, -3 - expected) if is_sparse(tensor, dim, pattern)), None)


def is_sparse(tensor: Tensor, dim: int, pattern: Pattern) -> bool:
    """Whether a matrix, or a stack of them, has the pattern along a dimension, -1 or -2."""
    return tensor.dim() > 1 and tensor.shape[dim] % pattern.m == 0 and is_nm_sparse(tensor, *pattern, dim)
