"""Triton: pruning in every form."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from ..formats import FORMS, form_shape
from ..operators import Pruning
from .compressed import store_compressed
from .groups import (
    LAUNCH,
    as_matrix,
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
def prune(weight: Tensor, how: Pruning) -> list[Tensor]:
    """Every form in one pass: the weight is read once, each result written once. The reference makes packed forms, and
    prunes in groups that are not 2:4."""
    rule, n, m, dim, mask, scale, dtype, forms = how
    if (rule != "mask" and (n, m) != (2, 4)) or any("packed" in form for form in forms):
        (pruned,) = reference.prune.prune(weight, how._replace(forms=["dense"]))
        return [in_form(pruned, form) for form in forms]
    # A mask has no groups, and its packed bits are those of the last dimension.
    matrix, along = as_matrix(weight, max(weight.dim() - 1, 0) if rule == "mask" else dim)
    rows, columns = matrix.shape
    out = {form: matrix.new_empty(form_shape(form, weight.shape), dtype=dtype) for form in forms}
    if matrix.numel():
        operands = matrix, None if mask is None else mask.contiguous(), scale
        results = [out.get(form) for form in ("dense", "transposed", "sm90", "sm90-transposed")]
        tiny = smallest_kept(dtype, None if rule == "soft-threshold" else weight.dtype)
        rules = {"RULE": rule, "DIM": along, "BITS": mask is not None and mask.dtype == torch.uint8, "TINY": tiny}
        _prune_kernel[grid(rows, columns)](*operands, *results, rows, columns, **rules, **LAUNCH)
    return [out[form] for form in forms]


def in_form(pruned: Tensor, form: str) -> Tensor:
    """A pruned tensor in a form. The two largest of a group are those that are there."""
    if "sm90" in form:
        return prune(pruned, Pruning("magnitude", dim=FORMS[form] or 0, dtype=pruned.dtype, forms=[form]))[0]
    return reference.packed.in_form(pruned, form)


@triton.jit
def _prune_kernel(
    weight,
    mask,
    scale,
    dense,
    transposed,
    compressed,
    compressed_transposed,
    rows,
    columns,
    RULE: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    TINY: tl.constexpr,
):
    top, left, row, column = tile(columns)
    x0, x1, x2, x3 = load4(weight, row, column, rows, columns)
    if RULE == "mask":
        y0 = x0 * _as_factor(load_mask(mask, row, left, column, rows, columns, BITS) != 0)
        y1 = x1 * _as_factor(load_mask(mask, row + 1, left, column, rows, columns, BITS) != 0)
        y2 = x2 * _as_factor(load_mask(mask, row + 2, left, column, rows, columns, BITS) != 0)
        y3 = x3 * _as_factor(load_mask(mask, row + 3, left, column, rows, columns, BITS) != 0)
    else:
        s = 1.0
        if scale is not None:
            s = tl.load(scale).to(tl.float32)
        NARROW: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth == 16
        if DIM == 1:
            y0, y1 = _prune_row(x0, s, RULE, NARROW), _prune_row(x1, s, RULE, NARROW)
            y2, y3 = _prune_row(x2, s, RULE, NARROW), _prune_row(x3, s, RULE, NARROW)
        else:
            y0, y1, y2, y3 = _prune_group(x0, x1, x2, x3, s, RULE, NARROW)
    if dense is not None:
        store4(dense, y0, y1, y2, y3, row, column, rows, columns, TINY)
    if transposed is not None:
        store_transposed(transposed, y0, y1, y2, y3, top, left, rows, columns, TINY)
    if compressed is not None:
        store_compressed(compressed, y0, y1, y2, y3, top, left, rows, columns, 1, TINY)
    if compressed_transposed is not None:
        store_compressed(compressed_transposed, y0, y1, y2, y3, top, left, rows, columns, 0, TINY)


@triton.jit
def _as_factor(keep):
    """1 or 0 to multiply with, so that a NaN shows even where it is masked."""
    return tl.where(keep, 1.0, 0.0)


@triton.jit
def _prune_group(x0, x1, x2, x3, scale, RULE: tl.constexpr, NARROW: tl.constexpr):
    """Four members of a group, pruned by magnitude or by the soft threshold."""
    if RULE == "magnitude":
        k0, k1, k2, k3 = two_largest(x0, x1, x2, x3, NARROW)
        return x0 * _as_factor(k0), x1 * _as_factor(k1), x2 * _as_factor(k2), x3 * _as_factor(k3)
    else:
        # sign(x) * max(|x| - t, 0), t the second smallest magnitude of the four; a NaN spreads over its group.
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
        return y0 * scale, y1 * scale, y2 * scale, y3 * scale


@triton.jit
def _prune_row(x, scale, RULE: tl.constexpr, NARROW: tl.constexpr):
    """`_prune_group` for every four in a row: `[R, 4K]` -> `[R, 4K]`."""
    x0, x1, x2, x3 = split4(x)
    y0, y1, y2, y3 = _prune_group(x0, x1, x2, x3, scale, RULE, NARROW)
    return join4(y0, y1, y2, y3)
