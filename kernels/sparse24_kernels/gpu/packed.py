"""Triton: a packed matrix made dense again, and multiplied by a few tokens without ever being dense in memory.

A linear layer reads its whole weight for one token as for many, so for few tokens the time is that of reading.

* The weight is expanded in registers and goes to the tensor cores, by shifts, two values to a register. Gathering x by
  index would load from L1 per value and token, and zeros would no longer count where x is inf or NaN.
* Tokens are the rows of the GEMM, padded to 16, so each warp expands rows of the weight that no other needs.
* Where the weight has few rows, K is split: each part writes its own sums in fp32, and a second kernel adds the parts
  in their order. No atomics: a result has the same bits every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from .groups import COLS, LAUNCH, grid, join4, on_its_device, tile

FILL = 256
"""Programs that keep a GPU busy: about two per multiprocessor of an H100 or H200 (132), so eight warps."""
LARGEST_BLOCK = 64
"""Tokens that share one pass over the weight."""
SHORTEST_PART = 512
"""Columns of K that are worth a program of their own."""
SUM = 1024
"""Elements that a program adds up where K was split."""
PLACES = tl.constexpr(sum((i | j << 2) << 4 * (1 << i | 1 << j) for i in range(4) for j in range(i + 1, 4)))
"""By the mask of a group, 4 bits each: the places of its two values."""


@on_its_device
def unpack_nm(values: Tensor, mask: Tensor, scales: Tensor | None, m: int) -> Tensor:
    """Values where the mask has ones, zeros elsewhere. Patterns other than 2:4 are the reference's."""
    rows, columns = mask.shape[0], 8 * mask.shape[1]
    if m != 4 or 2 * values.shape[1] != columns:
        return reference.packed.unpack_nm(values, mask, scales, m)
    if scales is not None:
        values = reference.packed.scaled(values, scales, columns)
    # As integers: values are only moved.
    integer = reference.masks.integer_of(values)
    dense = values.new_empty(rows, columns, dtype=integer)
    if dense.numel():
        _unpack_kernel[grid(rows, columns)](
            values.contiguous().view(integer), mask.contiguous(), dense, rows, columns, **LAUNCH
        )
    return dense.view(values.dtype)


@triton.jit
def _unpack_kernel(values, mask, dense, rows, columns):
    _, left, top, column = tile(columns)
    half = left // 2 + tl.arange(0, COLS // 2)[None, :]
    for slice in tl.static_range(4):
        row = top + slice
        v = tl.load(values + row * (columns // 2) + half, mask=(row < rows) & (half < columns // 2), other=0)
        first, second = tl.split(v.reshape(v.shape[0], COLS // 4, 2))
        nibble = _load_nibbles(mask, row, left, rows, columns, 2, COLS)
        i, j = nibble & 3, (nibble >> 2) & 3
        zero = tl.zeros_like(first)
        x = join4(
            tl.where(i == 0, first, zero),
            tl.where(i == 1, first, tl.where(j == 1, second, zero)),
            tl.where(i == 2, first, tl.where(j == 2, second, zero)),
            tl.where(j == 3, second, zero),
        )
        tl.store(dense + row * columns + column, x, mask=(row < rows) & (column < columns))


@triton.jit
def _unpack_pairs(pairs, mask, row, left, rows, columns, DTYPE: tl.constexpr, GROUPS: tl.constexpr, COLS: tl.constexpr):
    """Rows `[R, 1]` of a packed matrix, COLS columns from `left` on, as `[R, COLS]` with zeros; zeros outside.

    Of 16-bit values, two in an int32, with half the instructions of `_unpack_kernel`: each is shifted to its place in
    the 64 bits of its group.
    """
    group = left // 4 + tl.arange(0, COLS // 4)[None, :]
    pair = tl.load(pairs + row * (columns // 4) + group, mask=(row < rows) & (group < columns // 4), other=0)
    nibble = _load_nibbles(mask, row, left, rows, columns, GROUPS, COLS)
    first, second = (pair & 0xFFFF).to(tl.int64), ((pair >> 16) & 0xFFFF).to(tl.int64)
    four = (first << ((nibble << 4) & 48).to(tl.int64)) | (second << ((nibble << 2) & 48).to(tl.int64))
    return join4(
        four.to(tl.int16).to(DTYPE, bitcast=True),
        (four >> 16).to(tl.int16).to(DTYPE, bitcast=True),
        (four >> 32).to(tl.int16).to(DTYPE, bitcast=True),
        (four >> 48).to(tl.int16).to(DTYPE, bitcast=True),
    )


@triton.jit
def _load_nibbles(mask, row, left, rows, columns, GROUPS: tl.constexpr, COLS: tl.constexpr):
    """The places of each group's two values, first | second << 2, from the mask in words of GROUPS groups: two in a
    byte, eight in an int32."""
    SPAN: tl.constexpr = 4 * GROUPS
    at = left // SPAN + tl.arange(0, COLS // SPAN)[None, :]
    words = tl.load(mask + row * (columns // SPAN) + at, mask=(row < rows) & (at < columns // SPAN), other=0)
    shifts = 4 * tl.arange(0, GROUPS)[None, None, :]
    four = ((words.expand_dims(2) >> shifts) & 15).reshape(words.shape[0], COLS // 4)
    # A table of 16 times 4 bits: 0b0011 -> 0 | 1 << 2, 0b0101 -> 0 | 2 << 2, ...
    return (tl.full(four.shape, PLACES, tl.int64) >> (four * 4).to(tl.int64)).to(tl.int32) & 15


@on_its_device
def packed_linear(
    x: Tensor, values: Tensor, mask: Tensor, scales: Tensor | None, m: int, bias: Tensor | None
) -> Tensor:
    """One pass over the weight, of 16 bits, for every `LARGEST_BLOCK` tokens."""
    (tokens, columns), rows = x.shape, len(values)
    if x.dtype == torch.float32 or scales is not None or m != 4 or 2 * values.shape[1] != columns:  # no plan has these
        return torch.nn.functional.linear(x, unpack_nm(values, mask, scales, m), bias)
    bias = None if bias is None else bias.contiguous()
    result = x.new_empty(tokens, rows)
    if not result.numel():
        return result
    block, height, width = _blocks(tokens)
    programs = triton.cdiv(tokens, block) * triton.cdiv(rows, height)
    parts = max(1, min(FILL // programs, columns // SHORTEST_PART))
    # Asynchronous copies, which fetch what the next steps need, have 4 bytes at least.
    words, groups = (_as_int32(mask), 8) if columns % 32 == 0 else (mask.contiguous(), 2)
    length = triton.cdiv(triton.cdiv(columns, width), parts) * width
    sums = result if parts == 1 else x.new_empty(parts, tokens, rows, dtype=torch.float32)
    operands = x.contiguous(), _as_int32(values), words, bias if parts == 1 else None, sums
    sizes = {"TOKENS": block, "GROUPS": groups, "ROWS": height, "COLS": width}
    options = {"num_warps": 4, "num_stages": 4, "enable_fp_fusion": True}
    _linear_kernel[(programs * parts,)](*operands, tokens, rows, columns, parts, length, **sizes, **options)
    if parts > 1:
        size = (triton.cdiv(result.numel(), SUM),)
        _sum_kernel[size](sums, bias, result, parts, rows, result.numel(), SIZE=SUM, enable_fp_fusion=False)
    return result


def _as_int32(x: Tensor) -> Tensor:
    """The same bits, copied where they do not begin at a multiple of 4 bytes."""
    x = x.contiguous()
    return (x.clone() if x.storage_offset() * x.element_size() % 4 else x).view(torch.int32)


def _blocks(tokens: int) -> tuple[int, int, int]:
    """Tokens, rows and columns of a program's block. 16 tokens are the fewest that tensor cores take."""
    if tokens <= 16:
        return 16, 32, 256
    # Every program reads all of x, so for more tokens it must do so for more rows.
    return min(LARGEST_BLOCK, triton.next_power_of_2(tokens)), 64, 128


@triton.jit
def _linear_kernel(
    x,
    values,
    mask,
    bias,
    sums,
    tokens,
    rows,
    columns,
    parts,
    length,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Rows of the weight vary fastest over the programs, then parts of K, then blocks of tokens."""
    across = tl.cdiv(rows, ROWS)
    program = tl.program_id(0)
    part = program // across % parts
    token = (program // across // parts).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    top = (program % across).to(tl.int64) * ROWS
    row = top + tl.arange(0, ROWS)[:, None]
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    for left in range(part * length, tl.minimum((part + 1) * length, columns), COLS):
        column = left + tl.arange(0, COLS)[None, :]
        features = tl.load(x + token * columns + column, mask=(token < tokens) & (column < columns), other=0.0)
        weight = _unpack_pairs(values, mask, row, left, rows, columns, x.dtype.element_ty, GROUPS, COLS)
        total = tl.dot(features, weight.trans(1, 0), total)
    output = top + tl.arange(0, ROWS)[None, :]
    if bias is not None:
        total += tl.load(bias + output, mask=output < rows, other=0.0).to(tl.float32)
    pointer = sums + (part.to(tl.int64) * tokens + token) * rows + output
    tl.store(pointer, total.to(sums.dtype.element_ty), mask=(token < tokens) & (output < rows))


@triton.jit
def _sum_kernel(sums, bias, result, parts, rows, size, SIZE: tl.constexpr):
    """The parts of K added up in their order, and the bias: `[parts, size]` in fp32 -> `[size]`."""
    i = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    total, pointer = tl.zeros((SIZE,), tl.float32), sums + i
    for _ in range(parts):
        total += tl.load(pointer, mask=i < size, other=0.0)
        pointer += size
    if bias is not None:
        total += tl.load(bias + i % rows, mask=i < size, other=0.0).to(tl.float32)
    tl.store(result + i, total.to(result.dtype.element_ty), mask=i < size)
