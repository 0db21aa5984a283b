"""What the kernels share: tiles, groups of four in registers, masks as bits, values packed and cast.

A program works on a tile of 4 * G rows and COLS columns of a row-major matrix, held as four slices `[G, COLS]`: slice i
has rows i, i + 4, i + 8, ... So groups along a column are the four slices, element by element, and groups along a row
are four neighbours in a slice, which one thread loads together; `split4` tells them apart without moving anything
between threads. Sizes of a tile are capitals, sizes of a tensor small letters.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

G, COLS = 16, 64
"""The tile: 64 x 64, so that rows and (for transposed results) columns are read and written 128 bytes at a time."""

LAUNCH = {"G": G, "COLS": COLS, "num_warps": 4, "enable_fp_fusion": False}
"""Without fused multiply-add, so that a kernel's bits are those of the reference."""


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
    return (triton.cdiv(rows, 4 * G) * triton.cdiv(columns, COLS),)


@triton.jit
def tile(columns, G: tl.constexpr, COLS: tl.constexpr):
    """This program's rows `[G, 1]` (of slice 0; int64), first column, and columns `[1, COLS]`."""
    across = tl.cdiv(columns, COLS)
    program = tl.program_id(0)
    row = (program // across).to(tl.int64) * (4 * G) + 4 * tl.arange(0, G)[:, None]
    start = (program % across) * COLS
    return row, start, start + tl.arange(0, COLS)[None, :]


@triton.jit
def load4(ptr, row, column, rows, columns):
    """The four slices of a tile in fp32, zeros outside the matrix."""
    at, wide = ptr + row * columns + column, column < columns
    x0 = tl.load(at, mask=(row < rows) & wide, other=0.0).to(tl.float32)
    x1 = tl.load(at + columns, mask=(row + 1 < rows) & wide, other=0.0).to(tl.float32)
    x2 = tl.load(at + 2 * columns, mask=(row + 2 < rows) & wide, other=0.0).to(tl.float32)
    x3 = tl.load(at + 3 * columns, mask=(row + 3 < rows) & wide, other=0.0).to(tl.float32)
    return x0, x1, x2, x3


@triton.jit
def store4(ptr, x0, x1, x2, x3, row, column, rows, columns):
    """Write the four slices of a tile."""
    at, wide = ptr + row * columns + column, column < columns
    tl.store(at, x0, mask=(row < rows) & wide)
    tl.store(at + columns, x1, mask=(row + 1 < rows) & wide)
    tl.store(at + 2 * columns, x2, mask=(row + 2 < rows) & wide)
    tl.store(at + 3 * columns, x3, mask=(row + 3 < rows) & wide)


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
def columns_first(x0, x1, x2, x3):
    """The four slices `[G, COLS]` of a tile -> the transposed tile `[COLS, 4 * G]`."""
    tile = tl.join(tl.join(x0, x2), tl.join(x1, x3))
    return tile.permute(1, 0, 2, 3).reshape(x0.shape[1], 4 * x0.shape[0])


@triton.jit
def magnitude(x):
    """|x| as a key to compare by: NaN is +inf, the largest."""
    return tl.where(x != x, float("inf"), tl.abs(x))


@triton.jit
def two_largest(a0, a1, a2, a3):
    """Which two of four are largest, ties to the lower index: those that win two of their three comparisons."""
    w01, w02, w03, w12, w13, w23 = a0 >= a1, a0 >= a2, a0 >= a3, a1 >= a2, a1 >= a3, a2 >= a3
    k0 = (w01 & w02) | (w03 & (w01 | w02))
    k1 = (~w01 & w12) | (w13 & (~w01 | w12))
    k2 = (~w02 & ~w12) | (w23 & (~w02 | ~w12))
    k3 = (~w03 & ~w13) | (~w23 & (~w03 | ~w13))
    return k0, k1, k2, k3


@triton.jit
def largest_in_rows(x):
    """`two_largest` of every four in a row: `[R, 4K]` -> bool `[R, 4K]`."""
    a0, a1, a2, a3 = split4(magnitude(x))
    k0, k1, k2, k3 = two_largest(a0, a1, a2, a3)
    return join4(k0, k1, k2, k3)


@triton.jit
def largest4(x0, x1, x2, x3, DIM: tl.constexpr):
    """The 2:4 mask of a tile by magnitude, slice by slice."""
    if DIM == 1:
        return largest_in_rows(x0), largest_in_rows(x1), largest_in_rows(x2), largest_in_rows(x3)
    else:
        return two_largest(magnitude(x0), magnitude(x1), magnitude(x2), magnitude(x3))


@triton.jit
def pack4(x0, x1, x2, x3, k0, k1, k2, k3):
    """The two kept of four, in order, and their places as a nibble: first | second << 2."""
    first = tl.where(k0, x0, tl.where(k1, x1, x2))
    second = tl.where(k3, x3, tl.where(k2, x2, x1))
    place = tl.where(k0, 0, tl.where(k1, 1, 2)) | tl.where(k3, 12, tl.where(k2, 8, 4))
    return first, second, place.to(tl.uint8)


@triton.jit
def nibbles_to_bytes(nibbles):
    """`[R, 2B]` -> `[R, B]`: the even column in the lower half of each byte."""
    low, high = tl.split(nibbles.reshape(nibbles.shape[0], nibbles.shape[1] // 2, 2))
    return low | (high << 4)


@triton.jit
def bits_of(keep):
    """bool `[R, 8B]` -> uint8 `[R, B]`: bit j of a byte is column 8b + j."""
    k0, k1, k2, k3 = split4(keep.to(tl.uint8))
    return nibbles_to_bytes(k0 | (k1 << 1) | (k2 << 2) | (k3 << 3))


@triton.jit
def load_mask(ptr, row, start, column, rows, columns, BITS: tl.constexpr):
    """A slice of a mask, bool or packed bits in memory, as bool `[G, COLS]`; false outside the matrix."""
    if BITS:
        width = (columns + 7) // 8
        byte = start // 8 + tl.arange(0, column.shape[1] // 8)[None, :]
        packed = tl.load(ptr + row * width + byte, mask=(row < rows) & (byte < width), other=0).to(tl.int32)
        bits = (packed.expand_dims(2) >> tl.arange(0, 8)[None, None, :]) & 1
        return bits.reshape(packed.shape[0], column.shape[1]) != 0
    else:
        return tl.load(ptr + row * columns + column, mask=(row < rows) & (column < columns), other=0) != 0


@triton.jit
def store_mask(ptr, keep, row, start, column, rows, columns, BITS: tl.constexpr):
    """Write a slice of a mask as bool or as packed bits, zeros in the last byte's unused bits."""
    inside = (row < rows) & (column < columns)
    if BITS:
        width = (columns + 7) // 8
        byte = start // 8 + tl.arange(0, column.shape[1] // 8)[None, :]
        tl.store(ptr + row * width + byte, bits_of(keep & inside), mask=(row < rows) & (byte < width))
    else:
        tl.store(ptr + row * columns + column, keep, mask=inside)


@triton.jit
def cast(y, DTYPE: tl.constexpr, MAX: tl.constexpr):
    """fp32 -> DTYPE, never -0.0; FP8 (where MAX is its largest value) saturates, NaN stays."""
    if MAX is not None:
        y = tl.where(y > MAX, MAX, tl.where(y < -MAX, -MAX, y))
    # Compared after the cast, which may round a small negative value to -0.0.
    return tl.where(y.to(DTYPE).to(tl.float32) == 0.0, 0.0, y).to(DTYPE)


def fp8_max(dtype: torch.dtype) -> float | None:
    """The largest value of an FP8 dtype, None for the others: `cast`'s MAX."""
    return torch.finfo(dtype).max if dtype.itemsize == 1 else None
