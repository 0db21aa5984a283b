"""Triton: MVUE estimates of a gradient in every form, with Philox numbers computed in the kernel."""

import triton
import triton.language as tl
from torch import Tensor

from ..formats import empty_packed
from ..reference.philox import ROUNDS
from .groups import LAUNCH, as_matrix, cast, grid, join4, load4, on_its_device, split4, store4, store_transposed, tile
from .packing import pack4, pack_columns, pack_rows


@on_its_device
def mvue(
    x: Tensor,
    key: Tensor,
    n: int,
    m: int,
    dim: int,
    estimator: str,
    form: str,
) -> list[Tensor]:
    """One read of `x`, one write of the estimate; the key is read on the device."""
    if 0 < dim < x.dim() - 1:
        first = x.movedim(dim, 0)
        return [mvue(first, key, n, m, 0, estimator, form)[0].movedim(0, dim).contiguous()]
    matrix, along = as_matrix(x, dim)
    rows, columns = matrix.shape
    stored: list[Tensor | None]
    if form == "packed":
        out = empty_packed(matrix if along == 1 else matrix.t(), x.dtype)
        stored = [*out]
    else:
        out = [x.new_empty(x.shape if form == "dense" else (columns, rows))]
        stored = [*out, None]
    if matrix.numel():
        _mvue_kernel[grid(rows, columns)](
            matrix,
            key,
            *stored,
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
    top, left, row, column = tile(columns, G, COLS)
    x0, x1, x2, x3 = load4(x, row, column, rows, columns)
    seed = tl.load(key)
    PACKED: tl.constexpr = FORM == "packed"
    if DIM == 1:
        # Vectors are rows: the four words of a counter are for the four slices.
        SIZE: tl.constexpr = 2 if KIND == "1:2 exact" else 4
        group = left // SIZE + tl.arange(0, COLS // SIZE)[None, :]
        u0, u1, u2, u3 = _uniform(seed, row // 4, group, 0, ROUNDS)
        if KIND == "2:4 approx":
            v0, v1, v2, v3 = _uniform(seed, row // 4, group, 1, ROUNDS)
        else:
            v0, v1, v2, v3 = u0, u1, u2, u3
        y0, y1 = _estimate_row(x0, u0, v0, KIND, PACKED), _estimate_row(x1, u1, v1, KIND, PACKED)
        y2, y3 = _estimate_row(x2, u2, v2, KIND, PACKED), _estimate_row(x3, u3, v3, KIND, PACKED)
    else:
        # Vectors are columns: the four words of a counter are for four neighbours in a slice.
        four = left // 4 + tl.arange(0, COLS // 4)[None, :]
        if KIND == "1:2 exact":
            u0, u1, u2, u3 = _uniform(seed, four, row // 2, 0, ROUNDS)
            y0, y1 = pick_one(x0, x1, join4(u0, u1, u2, u3))
            u0, u1, u2, u3 = _uniform(seed, four, row // 2 + 1, 0, ROUNDS)
            y2, y3 = pick_one(x2, x3, join4(u0, u1, u2, u3))
            if PACKED:
                group = pack4(y0, y1, y2, y3, y1, y2, y3)
        else:
            u0, u1, u2, u3 = _uniform(seed, four, row // 4, 0, ROUNDS)
            u = join4(u0, u1, u2, u3)
            v = u
            if KIND == "2:4 approx":
                u0, u1, u2, u3 = _uniform(seed, four, row // 4, 1, ROUNDS)
                v = join4(u0, u1, u2, u3)
            group = _estimate_group(x0, x1, x2, x3, u, v, KIND, PACKED)
            if not PACKED:
                y0, y1, y2, y3 = group
    # MVUE never shrinks a kept magnitude, so no cast underflows and `cast` needs no TINY.
    if PACKED:
        if DIM == 1:
            pack_rows(out, indices, (y0, y1, y2, y3), top, left, rows, columns, None)
        else:
            pack_columns(out, indices, group, top, left, rows, columns, None)
    elif FORM == "transposed":
        store_transposed(out, y0, y1, y2, y3, top, left, rows, columns, None)
    else:
        D: tl.constexpr = out.dtype.element_ty
        z0, z1 = cast(y0, D, None), cast(y1, D, None)
        z2, z3 = cast(y2, D, None), cast(y3, D, None)
        store4(out, z0, z1, z2, z3, row, column, rows, columns)


@triton.jit
def _uniform(seed, four, group, DRAW: tl.constexpr, ROUNDS: tl.constexpr):
    """The reference's Philox numbers in [0, 1) for group `group` of vectors 4 * `four` to 4 * `four` + 3: four fp32."""
    zero = tl.zeros_like((four + group).to(tl.uint32))
    w0, w1, w2, w3 = tl.philox(seed, zero + four.to(tl.uint32), zero + group.to(tl.uint32), zero + DRAW, zero, ROUNDS)
    return _unit(w0), _unit(w1), _unit(w2), _unit(w3)


@triton.jit
def _unit(word):
    return (word >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216)


@triton.jit
def _estimate_row(x, u, v, KIND: tl.constexpr, PACKED: tl.constexpr):
    """Groups along the rows of a slice: the estimate as a slice, or packed by `_estimate_group`."""
    x0, x1, x2, x3 = split4(x)
    if KIND == "1:2 exact":
        first, second = tl.split(u.reshape(x0.shape[0], x0.shape[1], 2))
        y0, y1 = pick_one(x0, x1, first)
        y2, y3 = pick_one(x2, x3, second)
        if PACKED:
            return pack4(y0, y1, y2, y3, y1, y2, y3)
        else:
            return join4(y0, y1, y2, y3)
    elif PACKED:
        return _estimate_group(x0, x1, x2, x3, u, v, KIND, PACKED)
    else:
        y0, y1, y2, y3 = _estimate_group(x0, x1, x2, x3, u, v, KIND, PACKED)
        return join4(y0, y1, y2, y3)


@triton.jit
def _estimate_group(x0, x1, x2, x3, u, v, KIND: tl.constexpr, PACKED: tl.constexpr):
    """The four elements of the estimate; or packed, two of them and their indices."""
    if KIND == "2:4 exact" and PACKED:
        return pick_two_packed(x0, x1, x2, x3, u)
    elif KIND == "2:4 exact":
        return pick_two(x0, x1, x2, x3, u)
    elif PACKED:
        y0, y1, y2, y3 = draw_two(x0, x1, x2, x3, u, v)
        return pack4(y0, y1, y2, y3, y1, y2, y3)
    else:
        return draw_two(x0, x1, x2, x3, u, v)


@triton.jit
def _sample(x0, x1, x2, x3, u):
    """Exact 2:4 by systematic sampling: T, and between which elements the two points fall.

    The operations are those of `reference.mvue`, which explains them.
    """
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
    return pick, first < end0, first < end1, second < end1, second < end2


@triton.jit
def pick_two(x0, x1, x2, x3, u):
    """The four elements of the estimate."""
    ALL: tl.constexpr = tl.PropagateNan.ALL
    pick, first_by0, first_by1, second_by1, second_by2 = _sample(x0, x1, x2, x3, u)
    return (
        _value(x0, tl.maximum(tl.abs(x0), pick, ALL), first_by0),
        _value(x1, tl.maximum(tl.abs(x1), pick, ALL), (first_by1 & ~first_by0) | second_by1),
        _value(x2, tl.maximum(tl.abs(x2), pick, ALL), (~first_by1 | (second_by2 & ~second_by1)) & (x2 != 0)),
        _value(x3, tl.maximum(tl.abs(x3), pick, ALL), ~second_by2 & (x3 != 0)),
    )


@triton.jit
def pick_two_packed(x0, x1, x2, x3, u):
    """The two picked elements and their indices as a nibble, with half the arithmetic on values of `pick_two`."""
    ALL: tl.constexpr = tl.PropagateNan.ALL
    pick, first_by0, first_by1, second_by1, second_by2 = _sample(x0, x1, x2, x3, u)
    first = tl.where(first_by0, x0, tl.where(first_by1, x1, x2))
    second = tl.where(second_by1, x1, tl.where(second_by2, x2, x3))
    nibble = tl.where(first_by0, 0, tl.where(first_by1, 1, 2)) | tl.where(second_by1, 4, tl.where(second_by2, 8, 12))
    return (
        _value(first, tl.maximum(tl.abs(first), pick, ALL), first != 0),
        _value(second, tl.maximum(tl.abs(second), pick, ALL), second != 0),
        nibble,
    )


@triton.jit
def _value(x, size, keep):
    """`size` with the sign of x where kept, 0 elsewhere; multiplied, so that NaN stays visible."""
    return _signed(size, x) * tl.where(keep, 1.0, 0.0)


@triton.jit
def _signed(value, x):
    """`value`, which is not negative, with the sign of x."""
    sign = x.to(tl.uint32, bitcast=True) & 0x80000000
    return (value.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def pick_one(x0, x1, u):
    """Exact 1:2."""
    total = tl.abs(x0) + tl.abs(x1)
    by0 = u * total < tl.abs(x0)
    return _value(x0, total, by0 & (x0 != 0)), _value(x1, total, ~by0 & (x1 != 0))


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
        _drawn(x0, q0, total, (first == 0) | (second == 0)),
        _drawn(x1, q1, total, (first == 1) | (second == 1)),
        _drawn(x2, q2, total, (first == 2) | (second == 2)),
        _drawn(x3, q3, total, (first == 3) | (second == 3)),
    )


@triton.jit
def _without(a0, a1, a2, a3):
    low, high = a0 + a1, a2 + a3
    return a1 + high, a0 + high, low + a3, low + a2, low + high


@triton.jit
def _ratio(a, other):
    # Divided as the reference does: without `div_rn`, a GPU multiplies by a reciprocal.
    return tl.where(other > 0, tl.div_rn(a, other), 0.0)


@triton.jit
def _draw(w0, w1, w2, w3, u):
    end1 = w0 + w1
    end2 = end1 + w2
    point = u * (end2 + w3)
    return (w0 <= point).to(tl.int32) + (end1 <= point).to(tl.int32) + (end2 <= point).to(tl.int32)


@triton.jit
def _drawn(x, q, total, drawn):
    return tl.where(drawn & (x != 0), _signed(tl.div_rn(total, 1 + q), x), 0.0)
