"""Many tensors, one launch: a table of places, and for each program the tensor and the block that it works on.

A step that touches every weight of a model would otherwise launch hundreds of small kernels. Both tables are cached on
the device by their contents, so in a steady state nothing is uploaded, and a warmed-up step can be captured in a CUDA
graph, whose tables then live as long as the process.

Places are distances from a tensor that the kernel gets as an argument, in units of 16 bytes, and sizes are in units of
16 elements: so the compiler can prove that vector loads are aligned.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Bytes or elements per program."""

UNIT = 16
"""In bytes for places and in elements for sizes."""


def served(*tensors: Tensor) -> bool:
    """Whether flat vector loads can walk these tensors: row-major, aligned, of a size that divides."""
    return all(x.is_contiguous() and x.data_ptr() % UNIT == 0 and x.numel() % UNIT == 0 and x.numel() for x in tensors)


def distance(tensor: Tensor, base: Tensor) -> int:
    """How far `tensor` lies behind `base` (or, negative, before it), in units of 16 bytes."""
    return (tensor.data_ptr() - base.data_ptr()) // UNIT


_captured: list[tuple[Tensor, Tensor]] = []


def place_table(rows: list[tuple[int, ...]], device: torch.device) -> Tensor:
    """int64 `[len(rows), fields]` on the device."""
    return _kept(_upload(tuple(rows), torch.int64, device))


def block_table(sizes: list[int], device: torch.device) -> Tensor:
    """int32 `[programs, 2]` on the device: which tensor, and which block of it."""
    return _kept(_block_table(tuple(sizes), device))


def _kept(table: tuple[Tensor, Tensor]) -> Tensor:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        _captured.append(table)  # its graph may be replayed long after the caches have forgotten it
    return table[1]


@lru_cache(maxsize=64)
def _block_table(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    blocks = tuple((i, block) for i, size in enumerate(sizes) for block in range(triton.cdiv(size, BLOCK)))
    return _upload.__wrapped__(blocks, torch.int32, device)


@lru_cache(maxsize=64)
def _upload(rows: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The host's copy and the device's."""
    host = torch.tensor(rows, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return host, host.to(device, non_blocking=True)


@triton.jit
def my_block(blocks):
    """This program's tensor and block: two int64 scalars."""
    program = tl.program_id(0)
    return tl.load(blocks + 2 * program).to(tl.int64), tl.load(blocks + 2 * program + 1).to(tl.int64)


@triton.jit
def field(table, tensor, FIELDS: tl.constexpr, FIELD: tl.constexpr):
    """One entry of the table of places."""
    return tl.load(table + tensor * FIELDS + FIELD)


@triton.jit
def far(base, distance):
    """The pointer `distance` units of 16 bytes behind `base`."""
    return base + distance * (128 // base.dtype.element_ty.primitive_bitwidth)
