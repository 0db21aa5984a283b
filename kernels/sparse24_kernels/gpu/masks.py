"""Triton: 2:4 masks by magnitude."""

import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from ..formats import empty_mask
from .groups import LAUNCH, as_matrix, grid, load4, nibble_of, on_its_device, split4, store_mask, tile, two_largest


@on_its_device
def nm_mask(weight: Tensor, n: int, m: int, dim: int, packed: bool) -> Tensor:
    """One read of the weight, one write of the mask. Patterns other than 2:4 are the reference's."""
    if (n, m) != (2, 4):
        return reference.masks.nm_mask(weight, n, m, dim, packed)
    matrix, along = as_matrix(weight, dim)
    # Packed bits run along the last dimension, which is the matrix's own unless there are more than two.
    bits = packed and matrix.shape[1] == weight.shape[-1]
    mask = empty_mask(weight, bits)
    if matrix.numel():
        _nm_mask_kernel[grid(*matrix.shape)](matrix, mask, *matrix.shape, DIM=along, BITS=bits, **LAUNCH)
    return reference.masks.pack_bits(mask) if packed and not bits else mask


@triton.jit
def _nm_mask_kernel(weight, mask, rows, columns, DIM: tl.constexpr, BITS: tl.constexpr):
    _, left, row, column = tile(columns)
    x0, x1, x2, x3 = load4(weight, row, column, rows, columns)
    NARROW: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth == 16
    a0, a1, a2, a3 = split4(x0)
    b0, b1, b2, b3 = split4(x1)
    c0, c1, c2, c3 = split4(x2)
    d0, d1, d2, d3 = split4(x3)
    if DIM == 1:
        a0, a1, a2, a3 = two_largest(a0, a1, a2, a3, NARROW)
        b0, b1, b2, b3 = two_largest(b0, b1, b2, b3, NARROW)
        c0, c1, c2, c3 = two_largest(c0, c1, c2, c3, NARROW)
        d0, d1, d2, d3 = two_largest(d0, d1, d2, d3, NARROW)
    else:
        a0, b0, c0, d0 = two_largest(a0, b0, c0, d0, NARROW)
        a1, b1, c1, d1 = two_largest(a1, b1, c1, d1, NARROW)
        a2, b2, c2, d2 = two_largest(a2, b2, c2, d2, NARROW)
        a3, b3, c3, d3 = two_largest(a3, b3, c3, d3, NARROW)
    store_mask(mask, nibble_of(a0, a1, a2, a3), row, left, column, rows, columns, BITS)
    store_mask(mask, nibble_of(b0, b1, b2, b3), row + 1, left, column, rows, columns, BITS)
    store_mask(mask, nibble_of(c0, c1, c2, c3), row + 2, left, column, rows, columns, BITS)
    store_mask(mask, nibble_of(d0, d1, d2, d3), row + 3, left, column, rows, columns, BITS)
