"""Triton: exact MVUE estimates of a gradient, with Philox numbers computed in the kernel."""

import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from ..formats import form_shape
from ..reference.philox import ROUNDS
from .compressed import store_compressed
from .groups import COLS, LAUNCH, as_matrix, grid, join4, load4, on_its_device, split4, store4, store_transposed, tile
from .prune import in_form


@on_its_device
def mvue(x: Tensor, key: Tensor, n: int, m: int, dim: int, estimator: str, form: str) -> Tensor:
    """One read of `x`, one write of the estimate; the key is read on the device. The reference has 1:2, "approx", and
    packed forms."""
    if (n, m, estimator) != (2, 4, "exact") or "packed" in form:
        return in_form(reference.mvue.mvue(x, key, n, m, dim, estimator, "dense"), form)
    if 0 < dim < x.dim() - 1:
        return mvue(x.movedim(dim, 0), key, n, m, 0, estimator, form).movedim(0, dim).contiguous()
    matrix, along = as_matrix(x, dim)
    rows, columns = matrix.shape
    out = x.new_empty(form_shape(form, x.shape))
    if matrix.numel():
        how = {"DIM": along, "FORM": form, "ROUNDS": ROUNDS}
        _mvue_kernel[grid(rows, columns)](matrix, key, out, rows, columns, **how, **LAUNCH)
    return out


@triton.jit
def _mvue_kernel(x, key, out, rows, columns, DIM: tl.constexpr, FORM: tl.constexpr, ROUNDS: tl.constexpr):
    top, left, row, column = tile(columns)
    x0, x1, x2, x3 = load4(x, row, column, rows, columns)
    seed = tl.load(key)
    if DIM == 1:
        # Vectors are rows: the four words of a counter are for the four slices.
        group = left // 4 + tl.arange(0, COLS // 4)[None, :]
        u0, u1, u2, u3 = _uniform(seed, row // 4, group, ROUNDS)
        y0, y1 = _estimate_row(x0, u0), _estimate_row(x1, u1)
        y2, y3 = _estimate_row(x2, u2), _estimate_row(x3, u3)
    else:
        # Vectors are columns: the four words of a counter are for four neighbours in a slice.
        four = left // 4 + tl.arange(0, COLS // 4)[None, :]
        u0, u1, u2, u3 = _uniform(seed, four, row // 4, ROUNDS)
        y0, y1, y2, y3 = pick_two(x0, x1, x2, x3, join4(u0, u1, u2, u3))
    # MVUE never shrinks a kept magnitude, so no cast underflows and `cast` needs no TINY.
    if FORM == "sm90" or FORM == "sm90-transposed":
        store_compressed(out, y0, y1, y2, y3, top, left, rows, columns, DIM, None)
    elif FORM == "transposed":
        store_transposed(out, y0, y1, y2, y3, top, left, rows, columns, None)
    else:
        store4(out, y0, y1, y2, y3, row, column, rows, columns, None)


@triton.jit
def _uniform(seed, four, group, ROUNDS: tl.constexpr):
    """The reference's Philox numbers in [0, 1) for group `group` of vectors 4 * `four` to 4 * `four` + 3: four fp32."""
    zero = tl.zeros_like((four + group).to(tl.uint32))
    w0, w1, w2, w3 = tl.philox(seed, zero + four.to(tl.uint32), zero + group.to(tl.uint32), zero, zero, ROUNDS)
    return _unit(w0), _unit(w1), _unit(w2), _unit(w3)


@triton.jit
def _unit(word):
    return (word >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216)


@triton.jit
def _estimate_row(x, u):
    """The estimate of a slice whose groups run along its rows."""
    x0, x1, x2, x3 = split4(x)
    y0, y1, y2, y3 = pick_two(x0, x1, x2, x3, u)
    return join4(y0, y1, y2, y3)


@triton.jit
def pick_two(x0, x1, x2, x3, u):
    """Exact 2:4 by systematic sampling. The operations are those of `reference.mvue`, which explains them."""
    ALL: tl.constexpr = tl.PropagateNan.ALL
    a0, a1, a2, a3 = tl.abs(x0), tl.abs(x1), tl.abs(x2), tl.abs(x3)
    high01, high23 = tl.maximum(a0, a1, ALL), tl.maximum(a2, a3, ALL)
    largest = tl.maximum(high01, high23, ALL)
    others = tl.minimum(high01, high23, ALL) + tl.minimum(a0, a1, ALL) + tl.minimum(a2, a3, ALL)
    pick = tl.minimum(largest * 0.5 + others * 0.5, others, ALL)
    pick = tl.where(pick > 0, pick, largest)
    end0 = tl.minimum(a0, pick, ALL)
    end1 = tl.minimum(a1, pick, ALL) + end0
    end2 = tl.minimum(a2, pick, ALL) + end1
    first = u * pick
    second = first + pick
    first_by0, first_by1, second_by1, second_by2 = first < end0, first < end1, second < end1, second < end2
    return (
        _value(x0, tl.maximum(a0, pick, ALL), first_by0),
        _value(x1, tl.maximum(a1, pick, ALL), (first_by1 & ~first_by0) | second_by1),
        _value(x2, tl.maximum(a2, pick, ALL), (~first_by1 | (second_by2 & ~second_by1)) & (x2 != 0)),
        _value(x3, tl.maximum(a3, pick, ALL), ~second_by2 & (x3 != 0)),
    )


@triton.jit
def _value(x, size, keep):
    """`size` with the sign of x where kept, 0 elsewhere; multiplied, so that NaN stays visible."""
    sign = x.to(tl.uint32, bitcast=True) & 0x80000000
    return (size.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True) * tl.where(keep, 1.0, 0.0)
