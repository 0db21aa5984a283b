"""Parts that the kernels share: tiles, groups of four in registers, masks as bits, values packed and cast.

A program works on a tile of 4 * G rows and COLS columns of a row-major matrix, held as four slices `[G, COLS]`: slice i
has rows i, i + 4, i + 8, ... So groups along a column are the four slices, element by element, and groups along a row
are four neighbours in a slice, which one thread loads together; `split4` tells them apart without moving anything
between threads. Sizes of a tile are uppercase, sizes of a tensor lowercase.
"""

from collections.abc import Callable
from functools import wraps

import torch
import triton
import triton.language as tl
from torch import Tensor

SIDE = 64
"""The tile: 64 x 64, so that rows and (for transposed results) columns are read and written 128 bytes at a time."""

G, COLS = tl.constexpr(SIDE // 4), tl.constexpr(SIDE)

LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
"""Without fused multiply-add, so that a kernel's bits are those of the reference."""


def on_its_device(function: Callable) -> Callable:
    """Run `function` with the first argument's device as the current one, which is where Triton launches."""

    @wraps(function)
    def run(first, *rest):
        with torch.cuda.device_of(first):
            return function(first, *rest)

    return run


def as_matrix(x: Tensor, dim: int) -> tuple[Tensor, int]:
    """`x` as a row-major matrix whose groups run along dimension 1 (where `dim` is the last) or 0 (any other).

    For a `dim` between the first and the last, its size must be a multiple of the group's: a group would otherwise
    run on into the next block of rows.
    """
    x = x.contiguous() if x.dim() else x.view(1)
    last = dim == x.dim() - 1
    cut = dim if last else dim + 1
    return x.view(x.shape[:cut].numel(), x.shape[cut:].numel()), int(last)


def grid(rows: int, columns: int) -> tuple[int]:
    """One program per tile; none for an empty matrix."""
    return (triton.cdiv(rows, SIDE) * triton.cdiv(columns, SIDE),)


@triton.jit
def tile(columns):
    """This program's first row and column, rows `[G, 1]` of slice 0, and columns `[1, COLS]`; rows are int64."""
    across = tl.cdiv(columns, COLS)
    program = tl.program_id(0)
    top, left = (program // across).to(tl.int64) * (4 * G), (program % across) * COLS
    return top, left, top + 4 * tl.arange(0, G)[:, None], left + tl.arange(0, COLS)[None, :]


@triton.jit
def load4(ptr, row, column, rows, columns):
    """The four slices of a tile in fp32, zeros outside the matrix."""
    pointer, inside = ptr + row * columns + column, column < columns
    x0 = tl.load(pointer, mask=(row < rows) & inside, other=0.0).to(tl.float32)
    x1 = tl.load(pointer + columns, mask=(row + 1 < rows) & inside, other=0.0).to(tl.float32)
    x2 = tl.load(pointer + 2 * columns, mask=(row + 2 < rows) & inside, other=0.0).to(tl.float32)
    x3 = tl.load(pointer + 3 * columns, mask=(row + 3 < rows) & inside, other=0.0).to(tl.float32)
    return x0, x1, x2, x3


@triton.jit
def store4(ptr, y0, y1, y2, y3, row, column, rows, columns, TINY: tl.constexpr):
    """Write the four slices of a tile in the dtype of the result, see `cast`."""
    D: tl.constexpr = ptr.dtype.element_ty
    pointer, inside = ptr + row * columns + column, column < columns
    tl.store(pointer, cast(y0, D, TINY), mask=(row < rows) & inside)
    tl.store(pointer + columns, cast(y1, D, TINY), mask=(row + 1 < rows) & inside)
    tl.store(pointer + 2 * columns, cast(y2, D, TINY), mask=(row + 2 < rows) & inside)
    tl.store(pointer + 3 * columns, cast(y3, D, TINY), mask=(row + 3 < rows) & inside)


@triton.jit
def store_transposed(ptr, y0, y1, y2, y3, top, left, rows, columns, TINY: tl.constexpr):
    """Write a tile, given as slices `[G, COLS]`, into the row-major transpose `[columns, rows]`."""
    D: tl.constexpr = ptr.dtype.element_ty
    z0, z1, z2, z3 = cast(y0, D, TINY), cast(y1, D, TINY), cast(y2, D, TINY), cast(y3, D, TINY)
    z = tl.join(tl.join(z0, z2), tl.join(z1, z3)).permute(1, 0, 2, 3).reshape(COLS, 4 * G)
    r = top + tl.arange(0, 4 * G)[None, :]
    c = left.to(tl.int64) + tl.arange(0, COLS)[:, None]
    tl.store(ptr + c * rows + r, z, mask=(c < columns) & (r < rows))


@triton.jit
def split4(x):
    """`[R, 4K]` -> four `[R, K]`: the first, second, third and fourth of every four in a row."""
    even, odd = tl.split(x.reshape(x.shape[0], x.shape[1] // 4, 2, 2))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def join4(x0, x1, x2, x3):
    """Four `[R, K]` -> `[R, 4K]`, the inverse of `split4`."""
    return tl.join(tl.join(x0, x2), tl.join(x1, x3)).reshape(x0.shape[0], 4 * x0.shape[1])


@triton.jit
def two_largest(x0, x1, x2, x3, NARROW: tl.constexpr):
    """Which two of four (fp32) are largest in magnitude, NaN above all, ties to the lower index.

    Without their sign, the bits of floats order as integers. NARROW says that the values came from 16 bits, so that
    the lowest bits are free: the index goes there, no two keys are equal, and it takes one threshold. They are cleared
    first, because a GPU sets those of a NaN. Else those are kept that win two of their three comparisons (a GPU has few
    registers for so many truth values).
    """
    a0, a1 = x0.to(tl.int32, bitcast=True) & 0x7FFFFFFF, x1.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    a2, a3 = x2.to(tl.int32, bitcast=True) & 0x7FFFFFFF, x3.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if NARROW:
        a0, a1, a2, a3 = (a0 & -4) | 3, (a1 & -4) | 2, (a2 & -4) | 1, a3 & -4
        low01, low23 = tl.minimum(a0, a1), tl.minimum(a2, a3)
        second = tl.maximum(tl.minimum(tl.maximum(a0, a1), tl.maximum(a2, a3)), tl.maximum(low01, low23))
        return a0 >= second, a1 >= second, a2 >= second, a3 >= second
    else:
        w01, w02, w03, w12, w13, w23 = a0 >= a1, a0 >= a2, a0 >= a3, a1 >= a2, a1 >= a3, a2 >= a3
        k0 = (w01 & w02) | (w03 & (w01 | w02))
        k1 = (~w01 & w12) | (w13 & (~w01 | w12))
        k2 = (~w02 & ~w12) | (w23 & (~w02 | ~w12))
        k3 = (~w03 & ~w13) | (~w23 & (~w03 | ~w13))
        return k0, k1, k2, k3


@triton.jit
def nibble_of(k0, k1, k2, k3):
    """Four booleans as the four low bits of a byte. (Joining booleans would cost several times as much.)"""
    low = tl.where(k0, 1, 0) | tl.where(k1, 2, 0)
    return (low | tl.where(k2, 4, 0) | tl.where(k3, 8, 0)).to(tl.uint8)


@triton.jit
def load_mask(ptr, row, left, column, rows, columns, BITS: tl.constexpr):
    """A slice of a mask, bool or packed bits in memory, as 0 or not 0 `[G, COLS]`; 0 outside the matrix."""
    if BITS:
        width = (columns + 7) // 8
        byte = left // 8 + tl.arange(0, column.shape[1] // 8)[None, :]
        packed = tl.load(ptr + row * width + byte, mask=(row < rows) & (byte < width), other=0).to(tl.int32)
        bits = packed.expand_dims(2) & (1 << tl.arange(0, 8))[None, None, :]
        return bits.reshape(packed.shape[0], column.shape[1])
    else:
        return tl.load(ptr + row * columns + column, mask=(row < rows) & (column < columns), other=0).to(tl.int32)


@triton.jit
def store_mask(ptr, nibble, row, left, column, rows, columns, BITS: tl.constexpr):
    """Write a slice of a mask, given as nibbles `[G, COLS / 4]`, as packed bits or as bool."""
    if BITS:
        width = (columns + 7) // 8
        byte = left // 8 + tl.arange(0, column.shape[1] // 8)[None, :]
        # Groups beyond the last column are zeros, two of which ties would keep; bits there must be 0.
        left_over = columns - left - 4 * tl.arange(0, column.shape[1] // 4)[None, :]
        nibble &= ((1 << tl.minimum(tl.maximum(left_over, 0), 4)) - 1).to(tl.uint8)
        low, high = tl.split(nibble.reshape(nibble.shape[0], nibble.shape[1] // 2, 2))
        tl.store(ptr + row * width + byte, low | (high << 4), mask=(row < rows) & (byte < width))
    else:
        keep = join4(nibble & 1, (nibble >> 1) & 1, (nibble >> 2) & 1, nibble >> 3)
        tl.store(ptr + row * columns + column, keep != 0, mask=(row < rows) & (column < columns))


@triton.jit
def cast(y, DTYPE: tl.constexpr, TINY: tl.constexpr):
    """fp32 -> DTYPE, never -0.0; NaN stays.

    TINY is what still rounds to zero in DTYPE, or None where y is known to be representable.
    """
    y = y + 0.0 if TINY is None else tl.where(tl.abs(y) <= TINY, 0.0, y)
    return y.to(DTYPE)


def smallest_kept(target: torch.dtype, source: torch.dtype | None = None) -> float | None:
    """TINY of `cast` to `target`, of values in fp32 or, where they are only kept or dropped, in `source`."""
    exact = source == target or target == torch.float32
    return None if exact else torch.finfo(target).smallest_normal * torch.finfo(target).eps / 2
