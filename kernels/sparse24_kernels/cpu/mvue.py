"""MVUE by the kernels for CPUs: the exact 2:4 estimate; everything else by the reference."""

import mmap
import sys

import torch
from torch import Tensor

from .. import reference
from .prune import run

_REUSED = 1 << 26  # bytes of memory that is kept at most

_memory: list[mmap.mmap] = []


def mvue(x: Tensor, key: Tensor, n: int, m: int, dim: int, estimator: str, form: str) -> Tensor:
    """Draw the estimate of `x` that `key` determines, "dense" or "transposed"; `dim` is not negative."""
    if (n, m, estimator) != (2, 4, "exact"):
        return reference.mvue.mvue(x, key, n, m, dim, estimator, form)
    estimate = _empty_like(x)
    run("mvue", x, estimate, dim, key=int(key))
    return estimate if form == "dense" else estimate.t().contiguous()


def _empty_like(x: Tensor) -> Tensor:
    """An uninitialised contiguous tensor, in the memory of the last one where that is free.

    A training step draws an estimate for every layer and drops it after one GEMM. Fresh memory, page by page from the
    operating system, takes twice the time of everything that the kernel does.
    """
    if not 0 < x.nbytes <= _REUSED:
        return x.new_empty(x.shape)
    memory = _memory.pop() if _memory else None  # so no other thread takes it
    # A tensor, and whatever shares its storage, holds a reference.
    if memory is None or len(memory) < x.nbytes or sys.getrefcount(memory) > 2:
        memory = mmap.mmap(-1, x.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _memory[:] = [memory]
    return torch.frombuffer(memory, dtype=x.dtype, count=x.numel()).view(x.shape)
