"""Compares, at the start of training, what has to be the same on all processes."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..weights.sharding import is_sharded
from ..weights.sparse_weight import SparseWeight


def check_ranks_agree(weights: Mapping[str, SparseWeight], settings: dict[str, Any]) -> None:
    """Raise ValueError, on every process, where settings, names of sparse weights, or masks and scales differ.

    All processes must call it. `settings` are values by name that can be pickled.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    facts = settings | {"the sparse weights": _digest(list(weights)), "masks and scales": _digest(_hashes(weights))}
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, facts)
    first = of_all[0]
    for number, found in enumerate(of_all):
        differing = sorted(name for name in first | found if first.get(name) != found.get(name))
        if differing:
            shown = "; ".join(f"{name}: {found.get(name)!r}, not {first.get(name)!r}" for name in differing)
            raise ValueError(
                f"process {number} differs from process 0 in {shown}; give all processes the same settings and the "
                f"same weights: from one checkpoint, or made after the same torch.manual_seed"
            )


def _hashes(weights: Mapping[str, SparseWeight]) -> list[int]:
    """Of the state that every process has whole."""
    state = [tensor for weight in weights.values() for tensor in weight.state.values()]
    return [_hash(tensor) for tensor in state if not is_sharded(tensor) and not tensor.is_meta]


def _hash(tensor: Tensor) -> int:
    # Also the sum by rows: an exclusive or forgets the order.
    rows = tensor.reshape(len(tensor), -1) if tensor.dim() else tensor.reshape(1, 1)
    return hash(tuple(torch.hash_tensor(rows, dim=1).tolist())) if rows.numel() else 0


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]
