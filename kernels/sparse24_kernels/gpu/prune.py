"""Triton: pruning in every form, S-STE's scale."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import empty_packed
from .groups import (
    LAUNCH,
    as_matrix,
    cast,
    grid,
    join4,
    load4,
    load_mask,
    on_its_device,
    smallest_kept,
    split4,
    store4,
    store_transposed,
    tile,
    two_largest,
)


@on_its_device
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
    out: dict[str, list[Tensor]] = {}
    for form in forms:
        if form == "packed":
            out[form] = empty_packed(matrix, dtype)
        else:
            out[form] = [matrix.new_empty(weight.shape if form == "dense" else (columns, rows), dtype=dtype)]
    if matrix.numel():
        _prune_kernel[grid(rows, columns)](
            matrix,
            None if mask is None else mask.contiguous(),
            scale,
            *out.get("dense", [None]),
            *out.get("transposed", [None]),
            *out.get("packed", [None, None]),
            rows,
            columns,
            RULE=rule,
            DIM=along,
            BITS=mask is not None and mask.dtype == torch.uint8,
            TINY=smallest_kept(dtype, None if rule == "soft-threshold" else weight.dtype),
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
    rows,
    columns,
    RULE: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    TINY: tl.constexpr,
    G: tl.constexpr,
    COLS: tl.constexpr,
):
    top, left, row, column = tile(columns, G, COLS)
    x0, x1, x2, x3 = load4(weight, row, column, rows, columns)
    if RULE == "mask":
        m0 = load_mask(mask, row, left, column, rows, columns, BITS)
        m1 = load_mask(mask, row + 1, left, column, rows, columns, BITS)
        m2 = load_mask(mask, row + 2, left, column, rows, columns, BITS)
        m3 = load_mask(mask, row + 3, left, column, rows, columns, BITS)
        y0, y1 = x0 * _as_factor(m0 != 0), x1 * _as_factor(m1 != 0)
        y2, y3 = x2 * _as_factor(m2 != 0), x3 * _as_factor(m3 != 0)
    else:
        s = 1.0
        if scale is not None:
            s = tl.load(scale).to(tl.float32)
        NARROW: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth == 16
        if DIM == 1:
            y0, m0 = _prune_row(x0, s, RULE, NARROW)
            y1, m1 = _prune_row(x1, s, RULE, NARROW)
            y2, m2 = _prune_row(x2, s, RULE, NARROW)
            y3, m3 = _prune_row(x3, s, RULE, NARROW)
        else:
            y0, y1, y2, y3, m0, m1, m2, m3 = _prune_group(x0, x1, x2, x3, s, RULE, NARROW)
    if dense is not None:
        D: tl.constexpr = dense.dtype.element_ty
        z0, z1, z2, z3 = cast(y0, D, TINY), cast(y1, D, TINY), cast(y2, D, TINY), cast(y3, D, TINY)
        store4(dense, z0, z1, z2, z3, row, column, rows, columns)
    if transposed is not None:
        store_transposed(transposed, y0, y1, y2, y3, top, left, rows, columns, TINY)
    if values is not None:
        n0 = _store_values(values, y0, m0, row, left, rows, columns, TINY)
        n1 = _store_values(values, y1, m1, row + 1, left, rows, columns, TINY)
        n2 = _store_values(values, y2, m2, row + 2, left, rows, columns, TINY)
        n3 = _store_values(values, y3, m3, row + 3, left, rows, columns, TINY)
        # The four slices share one integer, because one slice alone does not have work for all threads.
        BYTES: tl.constexpr = COLS // 8
        low, high = tl.split((n0 | (n1 << 8) | (n2 << 16) | (n3 << 24)).reshape(G, BYTES, 2))
        packed = (low | (high << 4)).expand_dims(1) >> (8 * tl.arange(0, 4))[None, :, None]
        row = top + tl.arange(0, 4 * G)[:, None]
        byte = left // 8 + tl.arange(0, BYTES)[None, :]
        inside = (row < rows) & (byte < columns // 8)
        tl.store(indices + row * (columns // 8) + byte, packed.to(tl.uint8).reshape(4 * G, BYTES), mask=inside)


@triton.jit
def _store_values(ptr, y, m, row, left, rows, columns, TINY: tl.constexpr):
    """Write the two stored of every four in the rows of a slice; return their indices as nibbles: first | second << 2.

    Stored are the two where m is not 0, or, of fewer, those and the first others. (Of more, the last two.) Whether the
    first element is one of the two follows from the others.
    """
    x0, x1, x2, x3 = split4(y)
    _, m1, m2, m3 = split4(m)
    k1, k2, k3 = m1 != 0, m2 != 0, m3 != 0
    first_is_1, first_is_2 = k1 & (k2 | k3), k2 & k3
    first = tl.where(first_is_2, x2, tl.where(first_is_1, x1, x0))
    second = tl.where(k3, x3, tl.where(k2, x2, x1))
    HALF: tl.constexpr = 2 * first.shape[1]
    D: tl.constexpr = ptr.dtype.element_ty
    stored = tl.join(cast(first, D, TINY), cast(second, D, TINY)).reshape(first.shape[0], HALF)
    half = left // 2 + tl.arange(0, HALF)[None, :]
    tl.store(ptr + row * (columns // 2) + half, stored, mask=(row < rows) & (half < columns // 2))
    return tl.where(first_is_2, 2, tl.where(first_is_1, 1, 0)) | tl.where(k3, 12, tl.where(k2, 8, 4))


@triton.jit
def _as_factor(keep):
    """1 or 0 to multiply with, so that a NaN shows even where it is masked."""
    return tl.where(keep, 1.0, 0.0)


@triton.jit
def _prune_group(x0, x1, x2, x3, scale, RULE: tl.constexpr, NARROW: tl.constexpr):
    """Four members of a group, pruned by magnitude or by the soft threshold; and not 0 where one is kept."""
    if RULE == "magnitude":
        k0, k1, k2, k3 = two_largest(x0, x1, x2, x3, NARROW)
        m0, m1, m2, m3 = _as_factor(k0), _as_factor(k1), _as_factor(k2), _as_factor(k3)
        return x0 * m0, x1 * m1, x2 * m2, x3 * m3, m0, m1, m2, m3
    else:
        y0, y1, y2, y3 = soften(x0, x1, x2, x3)
        y0, y1, y2, y3 = y0 * scale, y1 * scale, y2 * scale, y3 * scale
        return y0, y1, y2, y3, y0, y1, y2, y3


@triton.jit
def _prune_row(x, scale, RULE: tl.constexpr, NARROW: tl.constexpr):
    """`_prune_group` for every four in a row: `[R, 4K]` -> two `[R, 4K]`."""
    x0, x1, x2, x3 = split4(x)
    y0, y1, y2, y3, m0, m1, m2, m3 = _prune_group(x0, x1, x2, x3, scale, RULE, NARROW)
    return join4(y0, y1, y2, y3), join4(m0, m1, m2, m3)


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


@on_its_device
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
def _soften_row(x):
    x0, x1, x2, x3 = split4(x)
    y0, y1, y2, y3 = soften(x0, x1, x2, x3)
    return join4(y0, y1, y2, y3)


@triton.jit
def _scale_kernel(
    weight, sums, rows, columns, DIM: tl.constexpr, L1: tl.constexpr, G: tl.constexpr, COLS: tl.constexpr
):
    _, _, row, column = tile(columns, G, COLS)
    x0, x1, x2, x3 = load4(weight, row, column, rows, columns)
    if DIM == 1:
        y0, y1, y2, y3 = _soften_row(x0), _soften_row(x1), _soften_row(x2), _soften_row(x3)
    else:
        y0, y1, y2, y3 = soften(x0, x1, x2, x3)
    if L1:
        wanted = tl.abs(x0) + tl.abs(x1) + tl.abs(x2) + tl.abs(x3)
        kept = tl.abs(y0) + tl.abs(y1) + tl.abs(y2) + tl.abs(y3)
    else:
        wanted = x0 * y0 + x1 * y1 + x2 * y2 + x3 * y3
        kept = y0 * y0 + y1 * y1 + y2 * y2 + y3 * y3
    tl.store(sums + tl.program_id(0), tl.sum(wanted))
    tl.store(sums + tl.num_programs(0) + tl.program_id(0), tl.sum(kept))
