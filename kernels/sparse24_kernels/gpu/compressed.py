"""Triton: the form of a tile for Hopper's sparse tensor cores, see `reference.packed.for_sm90`."""

import triton
import triton.language as tl

from .groups import SIDE, cast, split4

_SIDE, _TILE = tl.constexpr(SIDE), tl.constexpr(32)
"""Rows of a tile, here and in the layout, and columns of one in the layout."""


@triton.jit
def store_compressed(out, y0, y1, y2, y3, top, left, rows, columns, DIM: tl.constexpr, TINY: tl.constexpr):
    """Write a tile, given as slices `[G, COLS]`, compressed along its rows (DIM 1), or its transpose along its columns
    (DIM 0). Rows and columns are multiples of `SIDE`."""
    D: tl.constexpr = out.dtype.element_ty
    z0, z1, z2, z3 = cast(y0, D, TINY), cast(y1, D, TINY), cast(y2, D, TINY), cast(y3, D, TINY)
    if DIM == 1:
        a, b, c, d = _two_in_row(z0), _two_in_row(z1), _two_in_row(z2), _two_in_row(z3)
        first, second = _rows(a[0], b[0], c[0], d[0]), _rows(a[1], b[1], c[1], d[1])
        _store(out, first, second, _rows(a[2], b[2], c[2], d[2]), top, left, rows, columns)
    else:
        first, second, places = _two_of_four(z0, z1, z2, z3)
        _store(out, first.trans(1, 0), second.trans(1, 0), places.trans(1, 0), left, top, columns, rows)


@triton.jit
def _two_of_four(x0, x1, x2, x3):
    """The two that are stored of four, in order, and their places. Zeros fill up where fewer are not zero; that x0 is
    one of the two follows from the others."""
    kept1, kept2, kept3 = x1.to(tl.float32) != 0, x2.to(tl.float32) != 0, x3.to(tl.float32) != 0
    from1, from2 = kept1 & (kept2 | kept3), kept2 & kept3
    first = tl.where(from2, x2, tl.where(from1, x1, x0))
    second = tl.where(kept3, x3, tl.where(kept2, x2, x1))
    return first, second, tl.where(from2, 2, tl.where(from1, 1, 0)) | tl.where(kept3, 12, tl.where(kept2, 8, 4))


@triton.jit
def _two_in_row(x):
    x0, x1, x2, x3 = split4(x)
    return _two_of_four(x0, x1, x2, x3)


@triton.jit
def _rows(x0, x1, x2, x3):
    """Four slices `[G, K]`, whose rows take turns -> `[4G, K]`."""
    x = tl.join(tl.join(x0, x2), tl.join(x1, x3))
    return x.permute(0, 2, 3, 1).reshape(4 * x0.shape[0], x0.shape[1])


@triton.jit
def _store(out, first, second, places, top, left, rows, columns):
    """Write what is stored of the rows from `top` and the columns from `left` on: `[SIDE, SIDE / 4]` each."""
    row, half = top + tl.arange(0, _SIDE)[:, None], left // 2 + tl.arange(0, _SIDE // 2)[None, :]
    tl.store(out + row.to(tl.int64) * (columns // 2) + half, tl.join(first, second).reshape(_SIDE, _SIDE // 2))
    low, high = tl.split(places.reshape(4, 2, 8, _SIDE // 4).permute(0, 2, 3, 1))
    group = tl.arange(0, _SIDE // 4)[None, None, :]
    byte = tl.arange(0, 4)[:, None, None] * 64 + tl.arange(0, 8)[None, :, None] * 8
    byte += (group & 1) * 2 + (group & 2) * 2 + (group & 4) // 4
    tile = tl.cast(top // _SIDE, tl.int64) * (columns // _TILE) + left // _TILE + group // 8
    indices = out.to(tl.pointer_type(tl.uint8)) + tl.cast(rows, tl.int64) * columns
    tl.store(indices + tile * 256 + byte, (low | (high << 4)).to(tl.uint8))
