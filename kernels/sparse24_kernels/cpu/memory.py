"""Memory for what a training step makes and drops: pruned weights, estimates of gradients, results of sparse GEMMs.

malloc gives large blocks back to the operating system, and the next step gets fresh pages: faults in the kernels, and
in whatever allocates after them, that cost more than pruning. So the blocks of dropped tensors are kept.
"""

import math
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

SMALLEST = 1 << 18
"""Bytes from which on a block is kept: below, malloc keeps it."""

MOST_FREE = 1 << 29
"""Bytes of blocks that no tensor uses, at most; more are given back."""

_blocks: list[mmap.mmap] = []


def reused_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised contiguous CPU tensor, where possible in the memory of one that was dropped."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < SMALLEST:
        return torch.empty(shape, dtype=dtype, device="cpu")  # whatever the default device is
    found, free, kept = None, 0, []
    while _blocks:
        try:
            block = _blocks.pop()  # so that no other thread takes it
        except IndexError:
            break
        is_free = sys.getrefcount(block) == _UNUSED
        if found is None and is_free and len(block) == nbytes:
            found = block
        elif not is_free or free + len(block) <= MOST_FREE:  # others are given back, the oldest first
            free += len(block) * is_free
            kept.append(block)
    if found is None:
        found = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A tensor, and whatever shares its storage, holds a reference.
    made = torch.frombuffer(found, dtype=dtype).view(tuple(shape))
    _blocks.extend([*reversed(kept), found])
    return made


def _references_of_unused() -> int:
    """`sys.getrefcount` of a block that a loop holds alone. It depends on the version of Python."""
    blocks = [mmap.mmap(-1, mmap.PAGESIZE)]
    block = blocks.pop(0)
    return sys.getrefcount(block)


_UNUSED = _references_of_unused()
