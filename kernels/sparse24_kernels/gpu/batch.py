"""Many tensors in one launch: a table of tensors, and for each program the tensor and the block that it works on.

A step that touches every weight of a model would otherwise launch hundreds of small kernels. Both tables are cached on
the device by their contents, so in a steady state nothing is uploaded, and a warmed-up step can be captured in a CUDA
graph; tables of a captured graph live as long as the process.

The table of tensors holds offsets from one tensor that the kernel gets as an argument, in units of 16 bytes, and sizes
in units of 16 elements. With these units the compiler can prove that vector loads are aligned.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Bytes or elements per program."""

UNIT = 16
"""Bytes per unit of an offset, and elements per unit of a size."""


def is_vectorizable(*tensors: Tensor) -> bool:
    """Whether flat vector loads can read these tensors: not empty, contiguous, aligned, and of whole units."""
    return all(x.is_contiguous() and x.data_ptr() % UNIT == 0 and x.numel() % UNIT == 0 and x.numel() for x in tensors)


def offset(tensor: Tensor, base: Tensor) -> int:
    """Offset of `tensor` from `base`, negative if it is before it, in units of 16 bytes."""
    return (tensor.data_ptr() - base.data_ptr()) // UNIT


_captured: list[tuple[Tensor, Tensor]] = []


def tensor_table(rows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """int64 `[len(rows), entries]` on the device: one row of offsets, sizes and other numbers per tensor."""
    return _kept(_upload(tuple(rows), torch.int64, device))


def block_table(sizes: list[int], device: torch.device) -> Tensor:
    """int32 `[programs, 2]` on the device: which tensor, and which block of it."""
    return _kept(_block_table(tuple(sizes), device))


def _kept(table: tuple[Tensor, Tensor]) -> Tensor:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        _captured.append(table)  # the graph may be replayed long after the caches have dropped the table
    return table[1]


@lru_cache(maxsize=64)
def _block_table(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    blocks = tuple((i, block) for i, size in enumerate(sizes) for block in range(triton.cdiv(size, BLOCK)))
    return _upload.__wrapped__(blocks, torch.int32, device)


@lru_cache(maxsize=64)
def _upload(rows: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The copy on the host, which has to outlive the transfer, and the one on the device."""
    host = torch.tensor(rows, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return host, host.to(device, non_blocking=True)


@triton.jit
def my_block(blocks):
    """This program's tensor and block: two int64 scalars."""
    program = tl.program_id(0)
    return tl.load(blocks + 2 * program).to(tl.int64), tl.load(blocks + 2 * program + 1).to(tl.int64)


@triton.jit
def table_entry(table, tensor, ENTRIES: tl.constexpr, ENTRY: tl.constexpr):
    """One number of a tensor's row in the table of tensors."""
    return tl.load(table + tensor * ENTRIES + ENTRY)


@triton.jit
def pointer_at(base, offset):
    """The pointer `offset` units of 16 bytes after `base`."""
    return base + offset * (128 // base.dtype.element_ty.primitive_bitwidth)
