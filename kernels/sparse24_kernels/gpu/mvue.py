"""Triton: MVUE estimates of a gradient, dense, transposed or packed, with Philox numbers made on the spot."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.philox import ROUNDS
from .groups import (
    LAUNCH,
    as_matrix,
    cast,
    grid,
    join4,
    largest4,
    load4,
    split4,
    store4,
    tile,
)
from .prune import pack_columns, pack_row, store_transposed


def mvue(x: Tensor, key: Tensor, n: int, m: int, dim: int, estimator: str, form: str) -> list[Tensor]:
    """One read of `x`, one write of the estimate; the key is read on the device."""
    missing = -x.shape[dim] % m
    if missing and 0 < dim < x.dim() - 1:
        # Only here would a group run on into the next block of rows.
        padded = torch.cat([x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim)
        return [mvue(padded, key, n, m, dim, estimator, form)[0].narrow(dim, 0, x.shape[dim]).contiguous()]
    matrix, along = as_matrix(x, dim)
    rows, columns = matrix.shape
    size, other = (columns, rows) if along == 1 else (rows, columns)
    if form == "packed":
        out = [x.new_empty(other, size // 2), x.new_empty(other, size // 8, dtype=torch.uint8)]
    else:
        out = [x.new_empty(x.shape if form == "dense" else (columns, rows))]
    if matrix.numel():
        _mvue_kernel[grid(rows, columns)](
            matrix,
            key,
            out[0],
            out[-1],
            rows,
            columns,
            DIM=along,
            KIND=f"{n}:{m} {estimator}",
            FORM=form,
            ROUNDS=ROUNDS,
            **LAUNCH,
        )
    return out


@triton.jit
def _mvue_kernel(
    x,
    key,
    out,
    indices,
    rows,
    columns,
    DIM: tl.constexpr,
    KIND: tl.constexpr,
    FORM: tl.constexpr,
    ROUNDS: tl.constexpr,
    G: tl.constexpr,
    COLS: tl.constexpr,
):
    row, start, column = tile(columns, G, COLS)
    x0, x1, x2, x3 = load4(x, row, column, rows, columns)
    seed = tl.load(key)
    if DIM == 1:
        y0 = _rows(x0, seed, row, start, KIND, ROUNDS)
        y1 = _rows(x1, seed, row + 1, start, KIND, ROUNDS)
        y2 = _rows(x2, seed, row + 2, start, KIND, ROUNDS)
        y3 = _rows(x3, seed, row + 3, start, KIND, ROUNDS)
    elif KIND == "1:2 exact":
        y0, y1 = pick_one(x0, x1, uniform(seed, row // 2, start, COLS, 0, ROUNDS))
        y2, y3 = pick_one(x2, x3, uniform(seed, row // 2 + 1, start, COLS, 0, ROUNDS))
    elif KIND == "2:4 approx":
        u, v = uniform(seed, row // 4, start, COLS, 0, ROUNDS), uniform(seed, row // 4, start, COLS, 1, ROUNDS)
        y0, y1, y2, y3 = draw_two(x0, x1, x2, x3, u, v)
    else:
        y0, y1, y2, y3 = pick_two(x0, x1, x2, x3, uniform(seed, row // 4, start, COLS, 0, ROUNDS))
    if FORM == "dense":
        D: tl.constexpr = out.dtype.element_ty
        z0, z1, z2, z3 = cast(y0, D, None), cast(y1, D, None), cast(y2, D, None), cast(y3, D, None)
        store4(out, z0, z1, z2, z3, row, column, rows, columns)
    elif FORM == "transposed":
        store_transposed(out, y0, y1, y2, y3, row, column, rows, columns, None)
    else:
        k0, k1, k2, k3 = largest4(y0, y1, y2, y3, DIM)
        if DIM == 1:
            pack_row(out, indices, y0, k0, row, start, rows, columns, None)
            pack_row(out, indices, y1, k1, row + 1, start, rows, columns, None)
            pack_row(out, indices, y2, k2, row + 2, start, rows, columns, None)
            pack_row(out, indices, y3, k3, row + 3, start, rows, columns, None)
        else:
            pack_columns(out, indices, y0, y1, y2, y3, k0, k1, k2, k3, row, column, rows, columns, None)


@triton.jit
def uniform(seed, row, start, COUNT: tl.constexpr, DRAW: tl.constexpr, ROUNDS: tl.constexpr):
    """fp32 `[R, COUNT]` in [0, 1): the reference's Philox numbers for columns `start` to `start + COUNT - 1`.

    The four words of a counter serve four neighbouring columns, so a thread makes what it uses and wastes nothing.
    """
    quarter = start // 4 + tl.arange(0, COUNT // 4)[None, :]
    zero = tl.zeros([row.shape[0], COUNT // 4], tl.uint32)
    c0, c1 = zero + quarter.to(tl.uint32), zero + row.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, zero + DRAW, zero, ROUNDS)
    return (join4(w0, w1, w2, w3) >> 8).to(tl.float32) * (1.0 / 16777216)


@triton.jit
def _rows(x, seed, row, start, KIND: tl.constexpr, ROUNDS: tl.constexpr):
    """Groups along the rows of a slice."""
    x0, x1, x2, x3 = split4(x)
    if KIND == "1:2 exact":
        u0, u1 = tl.split(
            uniform(seed, row, start // 2, x.shape[1] // 2, 0, ROUNDS).reshape(x.shape[0], x.shape[1] // 4, 2)
        )
        y0, y1 = pick_one(x0, x1, u0)
        y2, y3 = pick_one(x2, x3, u1)
    elif KIND == "2:4 approx":
        u = uniform(seed, row, start // 4, x.shape[1] // 4, 0, ROUNDS)
        v = uniform(seed, row, start // 4, x.shape[1] // 4, 1, ROUNDS)
        y0, y1, y2, y3 = draw_two(x0, x1, x2, x3, u, v)
    else:
        y0, y1, y2, y3 = pick_two(x0, x1, x2, x3, uniform(seed, row, start // 4, x.shape[1] // 4, 0, ROUNDS))
    return join4(y0, y1, y2, y3)


@triton.jit
def pick_two(x0, x1, x2, x3, u):
    """Exact 2:4 by systematic sampling; see the reference for the reasoning, whose operations these are."""
    ALL: tl.constexpr = tl.PropagateNan.ALL
    a0, a1, a2, a3 = tl.abs(x0), tl.abs(x1), tl.abs(x2), tl.abs(x3)
    high01, high23 = tl.maximum(a0, a1, ALL), tl.maximum(a2, a3, ALL)
    largest = tl.maximum(high01, high23, ALL)
    others = tl.minimum(high01, high23, ALL) + tl.minimum(a0, a1, ALL) + tl.minimum(a2, a3, ALL)
    pick = tl.minimum(largest * 0.5 + others * 0.5, others, ALL)
    end0 = tl.minimum(a0, pick, ALL)
    end1 = tl.minimum(a1, pick, ALL) + end0
    end2 = tl.minimum(a2, pick, ALL) + end1
    first = u * pick
    second = first + pick
    first_by1, second_by1, second_by2 = first < end1, second < end1, second < end2
    alone = pick == 0
    k0 = (first < end0) | alone
    k1 = (first_by1 & (first >= end0)) | second_by1 | alone
    k2 = ((first >= end1) | (second_by2 & (second >= end1)) | alone) & (a2 != 0)
    k3 = ((second >= end2) | alone) & (a3 != 0)
    return (
        _signed(tl.maximum(a0, pick, ALL), x0) * k0,
        _signed(tl.maximum(a1, pick, ALL), x1) * k1,
        _signed(tl.maximum(a2, pick, ALL), x2) * k2,
        _signed(tl.maximum(a3, pick, ALL), x3) * k3,
    )


@triton.jit
def _signed(value, x):
    """`value`, which is not negative, with the sign of x."""
    sign = x.to(tl.uint32, bitcast=True) & 0x80000000
    return (value.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def pick_one(x0, x1, u):
    """Exact 1:2."""
    a0, a1 = tl.abs(x0), tl.abs(x1)
    total = a0 + a1
    by0 = u * total < a0
    return _signed(total, x0) * (by0 & (a0 != 0)), _signed(total, x1) * (~by0 & (a1 != 0))


@triton.jit
def draw_two(x0, x1, x2, x3, u, v):
    """The two-draw 2:4 estimate."""
    a0, a1, a2, a3 = tl.abs(x0), tl.abs(x1), tl.abs(x2), tl.abs(x3)
    o0, o1, o2, o3, total = _without(a0, a1, a2, a3)
    q0, q1, q2, q3, _ = _without(_ratio(a0, o0), _ratio(a1, o1), _ratio(a2, o2), _ratio(a3, o3))
    first = _draw(a0, a1, a2, a3, u)
    b0, b1 = tl.where(first == 0, 0.0, a0), tl.where(first == 1, 0.0, a1)
    b2, b3 = tl.where(first == 2, 0.0, a2), tl.where(first == 3, 0.0, a3)
    second = _draw(b0, b1, b2, b3, v)
    return (
        _value(x0, q0, total, (first == 0) | (second == 0)),
        _value(x1, q1, total, (first == 1) | (second == 1)),
        _value(x2, q2, total, (first == 2) | (second == 2)),
        _value(x3, q3, total, (first == 3) | (second == 3)),
    )


@triton.jit
def _without(a0, a1, a2, a3):
    low, high = a0 + a1, a2 + a3
    return a1 + high, a0 + high, low + a3, low + a2, low + high


@triton.jit
def _ratio(a, other):
    return tl.where(other > 0, tl.div_rn(a, other), 0.0)


@triton.jit
def _draw(w0, w1, w2, w3, u):
    end1 = w0 + w1
    end2 = end1 + w2
    point = u * (end2 + w3)
    return (w0 <= point).to(tl.int32) + (end1 <= point).to(tl.int32) + (end2 <= point).to(tl.int32)


@triton.jit
def _value(x, q, total, drawn):
    value = _signed(tl.div_rn(total, 1 + q), x)
    return tl.where(drawn & (x != 0), value, 0.0)
