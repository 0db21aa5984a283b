"""Triton: the exact 2:4 transposable mask of every 4x4 tile, without ever writing the 90 patterns down.

A thread holds the 16 magnitudes of a tile. Each row can keep one of six pairs of columns; two rows together leave one
of 19 column counts, and the other two rows must make up the difference (`reference.transposable.halves`). So the
best tile is the best over 19 counts of (best upper half + best lower half): 72 sums of two pairs in place of 90 sums
of eight elements, and 52 comparisons in place of 89, ties as the reference. With a half goes its part of the mask, as
eight bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .groups import LAUNCH, grid, join4, load4, nibbles_to_bytes, split4, tile

_HUGE = tl.constexpr(torch.finfo(torch.float32).max / 16)  # what the reference takes for inf and NaN


def transposable_mask(weight: Tensor, n: int, m: int, solver: str, packed: bool) -> Tensor:
    """One read of the weight, one write of the mask."""
    weight = weight.contiguous()
    rows, columns = weight.shape
    mask = weight.new_empty(
        (rows, (columns + 7) // 8) if packed else (rows, columns), dtype=torch.uint8 if packed else torch.bool
    )
    if weight.numel():
        _transposable_kernel[grid(rows, columns)](weight, mask, rows, columns, BITS=packed, **LAUNCH)
    return mask


@triton.jit
def _transposable_kernel(weight, mask, rows, columns, BITS: tl.constexpr, G: tl.constexpr, COLS: tl.constexpr):
    row, start, column = tile(columns, G, COLS)
    x0, x1, x2, x3 = load4(weight, row, column, rows, columns)
    upper, upper_bits = _halves(_pairs(x0), _pairs(x1))
    lower, lower_bits = _halves(_pairs(x2), _pairs(x3))
    # Counts are in descending order, so what makes up for the i-th is the i-th from the end.
    best = upper[0] + lower[18]
    bits = upper_bits[0] | (lower_bits[18] << 8)
    for i in tl.static_range(1, 19):
        score = upper[i] + lower[18 - i]
        bits = tl.where(score > best, upper_bits[i] | (lower_bits[18 - i] << 8), bits)
        best = tl.maximum(score, best)
    tile_column = start // 4 + tl.arange(0, COLS // 4)[None, :]
    bits = tl.where(tile_column < columns // 4, bits, 0)
    for i in tl.static_range(4):
        nibble = (bits >> (4 * i)) & 15
        if BITS:
            width = (columns + 7) // 8
            byte = start // 8 + tl.arange(0, COLS // 8)[None, :]
            at = mask + (row + i) * width + byte
            tl.store(at, nibbles_to_bytes(nibble.to(tl.uint8)), mask=(row < rows) & (byte < width))
        else:
            keep = join4(nibble & 1, (nibble >> 1) & 1, (nibble >> 2) & 1, nibble >> 3) != 0
            tl.store(mask + (row + i) * columns + column, keep, mask=(row < rows) & (column < columns))


@triton.jit
def _pairs(x):
    """What a row of each tile keeps with each pair of columns: ab, ac, ad, bc, bd, cd."""
    a, b, c, d = split4(tl.abs(x))
    # `minimum` takes the number where the other is NaN.
    a, b, c, d = tl.minimum(a, _HUGE), tl.minimum(b, _HUGE), tl.minimum(c, _HUGE), tl.minimum(d, _HUGE)
    return a + b, a + c, a + d, b + c, b + d, c + d


@triton.jit
def _better(x, X, y, Y):
    """The larger of two scores and its bits; the first of equals."""
    return tl.maximum(x, y), tl.where(y > x, Y, X)


@triton.jit
def _halves(first, second):
    """For each of the 19 counts, in descending order, the best that two rows keep, and the bits they keep it with."""
    ab, ac, ad, bc, bd, cd = first
    AB, AC, AD, BC, BD, CD = second
    v1, b1 = _better(ab + AC, 0x53, ac + AB, 0x35)
    v2, b2 = _better(ab + AD, 0x93, ad + AB, 0x39)
    v4, b4 = _better(ac + AD, 0x95, ad + AC, 0x59)
    v6, b6 = _better(ab + BC, 0x63, bc + AB, 0x36)
    v7, b7 = _better(ab + BD, 0xA3, bd + AB, 0x3A)
    v8, b8 = _better(ac + BC, 0x65, bc + AC, 0x56)
    v10, b10 = _better(ad + BD, 0xA9, bd + AD, 0x9A)
    v11, b11 = _better(ac + CD, 0xC5, cd + AC, 0x5C)
    v12, b12 = _better(ad + CD, 0xC9, cd + AD, 0x9C)
    v14, b14 = _better(bc + BD, 0xA6, bd + BC, 0x6A)
    v16, b16 = _better(bc + CD, 0xC6, cd + BC, 0x6C)
    v17, b17 = _better(bd + CD, 0xCA, cd + BD, 0xAC)
    v9, b9 = _better(ab + CD, 0xC3, ac + BD, 0xA5)
    v9, b9 = _better(v9, b9, ad + BC, 0x69)
    v9, b9 = _better(v9, b9, bc + AD, 0x96)
    v9, b9 = _better(v9, b9, bd + AC, 0x5A)
    v9, b9 = _better(v9, b9, cd + AB, 0x3C)
    v0, v3, v5, v13, v15, v18 = ab + AB, ac + AC, ad + AD, bc + BC, bd + BD, cd + CD
    b0, b3, b5, b13, b15, b18 = 0x33, 0x55, 0x99, 0x66, 0xAA, 0xCC
    return (
        (v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15, v16, v17, v18),
        (b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15, b16, b17, b18),
    )
