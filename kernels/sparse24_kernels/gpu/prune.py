"""Triton: pruning in every form, the packed matrix made dense again, S-STE's scale."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .groups import (
    LAUNCH,
    as_matrix,
    cast,
    columns_first,
    fp8_max,
    grid,
    join4,
    largest4,
    load4,
    load_mask,
    nibbles_to_bytes,
    pack4,
    split4,
    store4,
    tile,
)


def prune(
    weight: Tensor,
    rule: str,
    n: int,
    m: int,
    dim: int,
    mask: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype,
    forms: list[str],
) -> list[Tensor]:
    """Every form in one pass: the weight is read once, each result written once."""
    # A mask has no groups, and its packed bits are those of the last dimension.
    matrix, along = as_matrix(weight, max(weight.dim() - 1, 0) if rule == "mask" else dim)
    rows, columns = matrix.shape
    new = matrix.new_empty
    out: dict[str, list[Tensor]] = {}
    for form in forms:
        out[form] = {
            "dense": lambda: [new(weight.shape, dtype=dtype)],
            "transposed": lambda: [new(columns, rows, dtype=dtype)],
            "packed": lambda: [new(rows, columns // 2, dtype=dtype), new(rows, columns // 8, dtype=torch.uint8)],
            "packed-transposed": lambda: [
                new(columns, rows // 2, dtype=dtype),
                new(columns, rows // 8, dtype=torch.uint8),
            ],
        }[form]()
    if matrix.numel():
        _prune_kernel[grid(rows, columns)](
            matrix,
            None if mask is None else mask.contiguous(),
            scale,
            *out.get("dense", [None]),
            *out.get("transposed", [None]),
            *out.get("packed", [None, None]),
            *out.get("packed-transposed", [None, None]),
            rows,
            columns,
            RULE=rule,
            DIM=along,
            BITS=mask is not None and mask.dtype == torch.uint8,
            MAX=fp8_max(dtype),
            **LAUNCH,
        )
    return [tensor for form in forms for tensor in out[form]]


@triton.jit
def _prune_kernel(
    weight,
    mask,
    scale,
    dense,
    transposed,
    values,
    indices,
    values_t,
    indices_t,
    rows,
    columns,
    RULE: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    MAX: tl.constexpr,
    G: tl.constexpr,
    COLS: tl.constexpr,
):
    row, start, column = tile(columns, G, COLS)
    x0, x1, x2, x3 = load4(weight, row, column, rows, columns)
    if RULE == "mask":
        k0 = load_mask(mask, row, start, column, rows, columns, BITS)
        k1 = load_mask(mask, row + 1, start, column, rows, columns, BITS)
        k2 = load_mask(mask, row + 2, start, column, rows, columns, BITS)
        k3 = load_mask(mask, row + 3, start, column, rows, columns, BITS)
    else:
        k0, k1, k2, k3 = largest4(x0, x1, x2, x3, DIM)
    if RULE == "soft-threshold":
        y0, y1, y2, y3 = _soften4(x0, x1, x2, x3, DIM)
        if scale is not None:
            s = tl.load(scale).to(tl.float32)
            y0, y1, y2, y3 = y0 * s, y1 * s, y2 * s, y3 * s
    else:
        # Products, so that a NaN shows even where it is masked.
        y0, y1, y2, y3 = x0 * k0, x1 * k1, x2 * k2, x3 * k3
    if dense is not None:
        DTYPE: tl.constexpr = dense.dtype.element_ty
        z0, z1, z2, z3 = cast(y0, DTYPE, MAX), cast(y1, DTYPE, MAX), cast(y2, DTYPE, MAX), cast(y3, DTYPE, MAX)
        store4(dense, z0, z1, z2, z3, row, column, rows, columns)
    if transposed is not None:
        store_transposed(transposed, y0, y1, y2, y3, row, column, rows, columns, MAX)
    if values is not None:
        pack_row(values, indices, y0, k0, row, start, rows, columns, MAX)
        pack_row(values, indices, y1, k1, row + 1, start, rows, columns, MAX)
        pack_row(values, indices, y2, k2, row + 2, start, rows, columns, MAX)
        pack_row(values, indices, y3, k3, row + 3, start, rows, columns, MAX)
    if values_t is not None:
        pack_columns(values_t, indices_t, y0, y1, y2, y3, k0, k1, k2, k3, row, column, rows, columns, MAX)


@triton.jit
def soften(x0, x1, x2, x3):
    """sign(x) * max(|x| - t, 0), t the second smallest magnitude of the four; a NaN spreads over its group."""
    ALL: tl.constexpr = tl.PropagateNan.ALL
    a0, a1, a2, a3 = tl.abs(x0), tl.abs(x1), tl.abs(x2), tl.abs(x3)
    lows = tl.maximum(tl.minimum(a0, a1, ALL), tl.minimum(a2, a3, ALL), ALL)
    highs = tl.minimum(tl.maximum(a0, a1, ALL), tl.maximum(a2, a3, ALL), ALL)
    t = tl.minimum(lows, highs, ALL)
    # x - clamp(x, -t, t), which a NaN in x or t comes through.
    y0 = x0 - tl.minimum(tl.maximum(x0, -t, ALL), t, ALL)
    y1 = x1 - tl.minimum(tl.maximum(x1, -t, ALL), t, ALL)
    y2 = x2 - tl.minimum(tl.maximum(x2, -t, ALL), t, ALL)
    y3 = x3 - tl.minimum(tl.maximum(x3, -t, ALL), t, ALL)
    return y0, y1, y2, y3


@triton.jit
def _soften_rows(x):
    x0, x1, x2, x3 = split4(x)
    y0, y1, y2, y3 = soften(x0, x1, x2, x3)
    return join4(y0, y1, y2, y3)


@triton.jit
def _soften4(x0, x1, x2, x3, DIM: tl.constexpr):
    if DIM == 1:
        return _soften_rows(x0), _soften_rows(x1), _soften_rows(x2), _soften_rows(x3)
    else:
        return soften(x0, x1, x2, x3)


@triton.jit
def store_transposed(ptr, y0, y1, y2, y3, row, column, rows, columns, MAX: tl.constexpr):
    """Write a tile into the row-major transpose `[columns, rows]`."""
    r = tl.min(row) + tl.arange(0, 4 * row.shape[0])[None, :]
    c = tl.reshape(column, (column.shape[1], 1)).to(tl.int64)
    y = cast(columns_first(y0, y1, y2, y3), ptr.dtype.element_ty, MAX)
    tl.store(ptr + c * rows + r, y, mask=(c < columns) & (r < rows))


@triton.jit
def pack_row(values, indices, y, keep, row, start, rows, columns, MAX: tl.constexpr):
    """Pack a slice along its rows: values `[rows, columns / 2]`, indices `[rows, columns / 8]`."""
    y0, y1, y2, y3 = split4(y)
    k0, k1, k2, k3 = split4(keep.to(tl.int8))
    first, second, nibble = pack4(y0, y1, y2, y3, k0 != 0, k1 != 0, k2 != 0, k3 != 0)
    v = cast(tl.join(first, second).reshape(y.shape[0], y.shape[1] // 2), values.dtype.element_ty, MAX)
    half = start // 2 + tl.arange(0, y.shape[1] // 2)[None, :]
    tl.store(values + row * (columns // 2) + half, v, mask=(row < rows) & (half < columns // 2))
    byte = start // 8 + tl.arange(0, y.shape[1] // 8)[None, :]
    tl.store(
        indices + row * (columns // 8) + byte,
        nibbles_to_bytes(nibble),
        mask=(row < rows) & (byte < columns // 8),
    )


@triton.jit
def pack_columns(values, indices, y0, y1, y2, y3, k0, k1, k2, k3, row, column, rows, columns, MAX: tl.constexpr):
    """Pack a tile along its columns: values `[columns, rows / 2]`, indices `[columns, rows / 8]`."""
    GROUPS: tl.constexpr = row.shape[0]
    top = tl.min(row)
    c = tl.reshape(column, (column.shape[1], 1)).to(tl.int64)
    first, second, nibble = pack4(y0, y1, y2, y3, k0, k1, k2, k3)
    v = tl.join(first, second).permute(1, 0, 2).reshape(column.shape[1], 2 * GROUPS)
    half = top // 2 + tl.arange(0, 2 * GROUPS)[None, :]
    v = cast(v, values.dtype.element_ty, MAX)
    tl.store(values + c * (rows // 2) + half, v, mask=(c < columns) & (half < rows // 2))
    byte = top // 8 + tl.arange(0, GROUPS // 2)[None, :]
    tl.store(
        indices + c * (rows // 8) + byte,
        nibbles_to_bytes(nibble.trans(1, 0)),
        mask=(c < columns) & (byte < rows // 8),
    )


def unpack_nm(values: Tensor, indices: Tensor) -> Tensor:
    """Zeros everywhere, then the stored values where their indices say."""
    rows, columns = values.shape[0], values.shape[1] * 2
    dense = values.new_empty(rows, columns)
    if dense.numel():
        _unpack_kernel[grid(rows, columns)](values.contiguous(), indices.contiguous(), dense, rows, columns, **LAUNCH)
    return dense


@triton.jit
def _unpack_kernel(values, indices, dense, rows, columns, G: tl.constexpr, COLS: tl.constexpr):
    row, start, column = tile(columns, G, COLS)
    x0 = _unpack_row(values, indices, row, start, rows, columns, COLS)
    x1 = _unpack_row(values, indices, row + 1, start, rows, columns, COLS)
    x2 = _unpack_row(values, indices, row + 2, start, rows, columns, COLS)
    x3 = _unpack_row(values, indices, row + 3, start, rows, columns, COLS)
    store4(dense, x0, x1, x2, x3, row, column, rows, columns)


@triton.jit
def _unpack_row(values, indices, row, start, rows, columns, COLS: tl.constexpr):
    half = start // 2 + tl.arange(0, COLS // 2)[None, :]
    v = tl.load(values + row * (columns // 2) + half, mask=(row < rows) & (half < columns // 2), other=0.0)
    first, second = tl.split(v.reshape(v.shape[0], COLS // 4, 2))
    byte = start // 8 + tl.arange(0, COLS // 8)[None, :]
    packed = tl.load(indices + row * (columns // 8) + byte, mask=(row < rows) & (byte < columns // 8), other=0)
    nibble = tl.join(packed & 15, packed >> 4).reshape(v.shape[0], COLS // 4)
    i, j = nibble & 3, nibble >> 2
    zero = tl.zeros_like(first)
    return join4(
        tl.where(i == 0, first, zero),
        tl.where(i == 1, first, tl.where(j == 1, second, zero)),
        tl.where(i == 2, first, tl.where(j == 2, second, zero)),
        tl.where(j == 3, second, zero),
    )


def s_ste_scale(weight: Tensor, n: int, m: int, dim: int, rule: str) -> Tensor:
    """One read of the weight: two sums per tile, added up in fp64, in a fixed order."""
    if rule == "none":
        return weight.new_ones((), dtype=torch.float32)
    matrix, along = as_matrix(weight, dim)
    programs = grid(*matrix.shape)
    sums = matrix.new_empty(2, *programs, dtype=torch.float32)
    if matrix.numel():
        _scale_kernel[programs](matrix, sums, *matrix.shape, DIM=along, L1=rule == "l1", **LAUNCH)
    wanted, kept = sums.sum(1, dtype=torch.float64).unbind()
    return torch.where(kept == 0, 1.0, wanted / kept).float()


@triton.jit
def _scale_kernel(
    weight, sums, rows, columns, DIM: tl.constexpr, L1: tl.constexpr, G: tl.constexpr, COLS: tl.constexpr
):
    row, start, column = tile(columns, G, COLS)
    x0, x1, x2, x3 = load4(weight, row, column, rows, columns)
    y0, y1, y2, y3 = _soften4(x0, x1, x2, x3, DIM)
    if L1:
        wanted = tl.abs(x0) + tl.abs(x1) + tl.abs(x2) + tl.abs(x3)
        kept = tl.abs(y0) + tl.abs(y1) + tl.abs(y2) + tl.abs(y3)
    else:
        wanted = x0 * y0 + x1 * y1 + x2 * y2 + x3 * y3
        kept = y0 * y0 + y1 * y1 + y2 * y2 + y3 * y3
    tl.store(sums + tl.program_id(0), tl.sum(wanted))
    tl.store(sums + tl.num_programs(0) + tl.program_id(0), tl.sum(kept))
