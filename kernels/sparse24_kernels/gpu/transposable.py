"""Triton: the exact 2:4 transposable mask of every 4x4 tile, without the 90 patterns.

A thread holds the 16 magnitudes of a tile and runs the tournament of `reference.transposable`: about 60 additions and
26 comparisons instead of 90 sums of eight elements, and ties have the same winner. Each score is carried along with its
part of the mask, 16 bits in a float, because adding two floats costs a GPU half of what joining two integers does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import empty_mask
from .groups import LAUNCH, grid, load4, on_its_device, split4, store_mask, tile

_HUGE = tl.constexpr(torch.finfo(torch.float32).max / 16)  # what the reference takes for inf and NaN


@on_its_device
def transposable_mask(weight: Tensor, n: int, m: int, solver: str, packed: bool) -> Tensor:
    """One read of the weight, one write of the mask."""
    weight = weight.contiguous()
    rows, columns = weight.shape
    mask = empty_mask(weight, packed)
    if weight.numel():
        _transposable_kernel[grid(rows, columns)](weight, mask, rows, columns, BITS=packed, **LAUNCH)
    return mask


@triton.jit
def _transposable_kernel(weight, mask, rows, columns, BITS: tl.constexpr):
    _, left, row, column = tile(columns)
    x0, x1, x2, x3 = load4(weight, row, column, rows, columns)
    bits = _best_pattern(_magnitudes(x0), _magnitudes(x1), _magnitudes(x2), _magnitudes(x3)).to(tl.int32)
    for i in tl.static_range(4):
        store_mask(mask, ((bits >> (4 * i)) & 15).to(tl.uint8), row + i, left, column, rows, columns, BITS)


@triton.jit
def _magnitudes(x):
    """The four columns of every tile in a slice; `minimum` takes the number where the other is NaN."""
    a, b, c, d = split4(tl.abs(x))
    return tl.minimum(a, _HUGE), tl.minimum(b, _HUGE), tl.minimum(c, _HUGE), tl.minimum(d, _HUGE)


@triton.jit
def _better(x, X, y, Y):
    """The larger of two scores, and its bits; the first of equals."""
    return tl.maximum(x, y), tl.where(y > x, Y, X)


@triton.jit
def _apart(x, y, X: tl.constexpr, Y: tl.constexpr):
    """For each two columns the better way to keep one in x and the other in y: ab, ac, ad, bc, bd, cd.

    Keeping column j in x sets the bits X * 2^j, and in y the bits Y * 2^j.
    """
    a, b, c, d = x
    A, B, C, D = y
    return (
        _better(a + B, X * 1.0 + Y * 2.0, b + A, X * 2.0 + Y * 1.0),
        _better(a + C, X * 1.0 + Y * 4.0, c + A, X * 4.0 + Y * 1.0),
        _better(a + D, X * 1.0 + Y * 8.0, d + A, X * 8.0 + Y * 1.0),
        _better(b + C, X * 2.0 + Y * 4.0, c + B, X * 4.0 + Y * 2.0),
        _better(b + D, X * 2.0 + Y * 8.0, d + B, X * 8.0 + Y * 2.0),
        _better(c + D, X * 4.0 + Y * 8.0, d + C, X * 8.0 + Y * 4.0),
    )


@triton.jit
def _all_apart(pairs):
    """Two columns kept in one of the two, two in the other."""
    ab, ac, _, _, bd, cd = pairs
    return _better(ac[0] + bd[0], ac[1] + bd[1], ab[0] + cd[0], ab[1] + cd[1])


@triton.jit
def _add(x, y):
    """Two rows, column by column."""
    return x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3]


@triton.jit
def _best_pattern(x0, x1, x2, x3):
    """The bits of the best of the 90 patterns, row by row, as fp32."""
    upper = _apart(x0, x1, 1.0, 16.0)
    lower = _apart(x2, x3, 256.0, 4096.0)
    halves = _apart(_add(x0, x1), _add(x2, x3), 17.0, 4352.0)
    score, bits = _all_apart(halves)
    for i in tl.static_range(6):
        # Pairs are ordered so that the i-th from the end has the other two columns.
        both = (upper[i][0] + lower[i][0]) + halves[5 - i][0]
        score, bits = _better(score, bits, both, (upper[i][1] + lower[i][1]) + halves[5 - i][1])
    above, above_bits = _all_apart(upper)
    below, below_bits = _all_apart(lower)
    score, bits = _better(score, bits, above + below, above_bits + below_bits)
    return bits
