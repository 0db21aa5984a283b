"""Triton: 2:4 masks by magnitude, and how many bits two masks differ in."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from .batch import BLOCK, UNIT, block_table, is_vectorizable, my_block, offset, pointer_at, table_entry, tensor_table
from .groups import LAUNCH, as_matrix, grid, load4, nibble_of, on_its_device, split4, store_mask, tile, two_largest


@on_its_device
def nm_mask(weight: Tensor, n: int, m: int, dim: int, packed: bool) -> Tensor:
    """One read of the weight, one write of the mask."""
    matrix, along = as_matrix(weight, dim)
    rows, columns = matrix.shape
    # Packed bits run along the last dimension, which is the matrix's own unless there are more than two.
    bits = packed and columns == weight.shape[-1]
    shape = (rows, (columns + 7) // 8) if bits else (rows, columns)
    mask = matrix.new_empty(shape, dtype=torch.uint8 if bits else torch.bool)
    if matrix.numel():
        _nm_mask_kernel[grid(rows, columns)](matrix, mask, rows, columns, DIM=along, BITS=bits, **LAUNCH)
    if bits:
        return mask.view(*weight.shape[:-1], shape[1])
    mask = mask.view(weight.shape)
    return reference.masks.pack_bits(mask) if packed else mask


@triton.jit
def _nm_mask_kernel(
    weight, mask, rows, columns, DIM: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr, COLS: tl.constexpr
):
    _, left, row, column = tile(columns, G, COLS)
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


@on_its_device
def count_flips(before: list[Tensor], after: list[Tensor]) -> Tensor:
    """All pairs in one launch; integers, so the order in which programs add does not matter."""
    flips = before[0].new_zeros(len(before), dtype=torch.int64)
    pairs = []
    for i, (old, new) in enumerate(zip(before, after)):
        if is_vectorizable(old, new):
            pairs.append((i, old, new))
        elif old.numel():
            flips[i] = reference.masks.count_flips([old], [new])[0]
    if pairs:
        _, first_old, first_new = pairs[0]
        rows = [(offset(old, first_old), offset(new, first_new), old.numel() // UNIT, i) for i, old, new in pairs]
        blocks = block_table([old.numel() for _, old, _ in pairs], flips.device)
        _flips_kernel[(len(blocks),)](
            first_old.view(-1).view(torch.int32),
            first_new.view(-1).view(torch.int32),
            tensor_table(rows, flips.device),
            blocks,
            flips,
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )
    return flips


@triton.jit
def _flips_kernel(olds, news, table, blocks, flips, BLOCK: tl.constexpr):
    tensor, block = my_block(blocks)
    old = pointer_at(olds, table_entry(table, tensor, 4, 0))
    new = pointer_at(news, table_entry(table, tensor, 4, 1))
    words = table_entry(table, tensor, 4, 2) * 4
    word = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    x = tl.load(old + word, mask=word < words, other=0) ^ tl.load(new + word, mask=word < words, other=0)
    x = x.to(tl.uint32, bitcast=True)
    # Bits set in pairs, in fours, in bytes, then all four bytes of a word.
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = (x + (x >> 8) + (x >> 16) + (x >> 24)) & 0xFF
    tl.atomic_add(flips + table_entry(table, tensor, 4, 3), tl.sum(x.to(tl.int32)).to(tl.int64))
