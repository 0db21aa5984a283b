"""Minimum-variance unbiased estimates: random n:m tensors whose expectation is the input."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .packed import in_form
from .philox import uniform
from .prune import wide


def mvue(x: Tensor, key: Tensor, n: int, m: int, dim: int, estimator: str, form: str) -> Tensor:
    """Draw the estimate of `x` that `key` determines, in one of `FORMS`; `dim` is not negative.

    Each group gets one random number (two for "approx"), determined by its index along `dim` and by the vector along
    `dim` that it is in. So the estimate of a transposed matrix along the other dimension is the transposed estimate.
    """
    size, missing = x.shape[dim], -x.shape[dim] % m
    if missing:
        x = torch.cat([x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim)
    before, count, after = x.shape[:dim], x.shape[dim] // m, x.shape[dim + 1 :]
    draws = [
        uniform(key, count, before.numel() * after.numel(), draw).view(count, *before, *after).movedim(0, dim)
        for draw in range(2 if estimator == "approx" else 1)
    ]
    estimate = _ESTIMATORS[n, m, estimator](x, *draws, dim).narrow(dim, 0, size)
    return in_form(estimate, form)


def _mvue_24(x: Tensor, uniform: Tensor, dim: int) -> Tensor:
    """Exact 2:4 MVUE by systematic sampling; `uniform` holds one number of [0, 1) per group.

    With magnitudes a, sum S and largest M, let T = min(S/2, S - M). Then b_i = min(a_i, T) sums to 2T, the optimal
    inclusion probability is b_i / T, and the unbiased value of a kept element is sign(x_i) * max(a_i, T): the largest
    element is kept as it is when it outweighs the other three, and everything else counts as T. Laying the b_i end to
    end and keeping those that the two points u*T and (u + 1)*T fall into picks exactly two. A group with one non-zero
    has T = 0 and no length to sample from; with T = M instead, it is picked together with a zero. (Subnormals for which
    S/2 rounds to 0 have T = 0 too, and a bias of their own size.)
    """
    values, member = wide(x).unflatten(dim, (-1, 4)), dim + 1
    a = values.abs()
    a0, a1, a2, a3 = a.unbind(member)
    high01, high23 = torch.maximum(a0, a1), torch.maximum(a2, a3)
    largest = torch.maximum(high01, high23)
    # S - M summed from its own three terms, because the difference would cancel where one value is huge. In place from
    # here on, because on a CPU fresh memory costs more than the arithmetic.
    others = torch.minimum(high01, high23).add_(torch.minimum(a0, a1)).add_(torch.minimum(a2, a3))
    pick = torch.minimum(largest * 0.5 + others * 0.5, others)  # T
    pick = torch.where(pick > 0, pick, largest)
    end0 = torch.minimum(a0, pick)
    end1 = torch.minimum(a1, pick).add_(end0)
    end2 = torch.minimum(a2, pick).add_(end1)
    first = uniform * pick
    second = first + pick
    # "by i" means: the point falls into the elements 0 to i. The first is always by 2, the second never by 0. Floats of
    # 0 and 1, because on a CPU torch writes comparisons to them four times as fast as to booleans. The ends ascend, so
    # a difference is "by i, and not by i - 1".
    first_by0, first_by1 = torch.lt(first, end0, out=end0), torch.lt(first, end1, out=torch.empty_like(end1))
    second_by1, second_by2 = torch.lt(second, end1, out=end1), torch.lt(second, end2, out=end2)
    picked = torch.stack(
        [
            first_by0,
            torch.maximum(first_by1 - first_by0, second_by1),
            torch.maximum(1 - first_by1, second_by2 - second_by1),
            1 - second_by2,
        ],
        member,
    )
    # Rounding may put a point behind the last non-zero; then a zero is picked and must stay a zero: its sign is 0.
    # Adding zero turns -0.0 into +0.0.
    estimate = torch.maximum(a, pick.unsqueeze(member), out=a).mul_(values.sign()).mul_(picked).add_(0.0)
    return estimate.reshape(x.shape).to(x.dtype)


def _mvue_12(x: Tensor, uniform: Tensor, dim: int) -> Tensor:
    """Exact 1:2 MVUE: keep x_i with probability |x_i| / (|x_0| + |x_1|), as sign(x_i) * (|x_0| + |x_1|)."""
    values, member = wide(x).unflatten(dim, (-1, 2)), dim + 1
    a0, a1 = values.abs().unbind(member)
    total = a0 + a1
    first = uniform * total < a0
    # `logical_and` keeps a zero from being picked where uniform * total rounds up to a0.
    kept = torch.stack([first.logical_and(a0), (~first).logical_and(a1)], member)
    estimate = total.unsqueeze(member).expand_as(values).copysign(values).mul_(kept).add_(0.0)
    return estimate.reshape(x.shape).to(x.dtype)


def _mvue_24_approx(x: Tensor, uniform: Tensor, uniform2: Tensor, dim: int) -> Tensor:
    """The two-draw 2:4 estimate: draw i with probability a_i / S, then j != i with a_j / (S - a_i).

    Each is divided by the exact probability of being drawn at all, p_i = a_i / S * (1 + sum_{j != i} r_j) with
    r_j = a_j / (S - a_j), so that the value of a drawn element is sign(x_i) * S / (1 + sum_{j != i} r_j).
    """
    values, member = wide(x).unflatten(dim, (-1, 4)), dim + 1
    parts = values.abs().unbind(member)
    others, total = _sums_of_the_other_three(*parts)
    ratios = [torch.where(other > 0, a / other, 0.0) for a, other in zip(parts, others)]
    first = _draw(parts, uniform)
    second = _draw([torch.where(first == i, 0.0, a) for i, a in enumerate(parts)], uniform2)
    kept = [
        torch.where((first == i) | (second == i), total / (1 + ratio), 0.0)
        for i, ratio in enumerate(_sums_of_the_other_three(*ratios)[0])
    ]
    # Where x is 0 nothing is kept: a zero is drawn only where fewer than two others are left, or by rounding.
    estimate = torch.stack(kept, member).copysign_(values).masked_fill_(values == 0, 0.0).add_(0.0)
    return estimate.reshape(x.shape).to(x.dtype)


def _sums_of_the_other_three(a0: Tensor, a1: Tensor, a2: Tensor, a3: Tensor) -> tuple[list[Tensor], Tensor]:
    """The sum of four without each of them in turn, not by subtraction, which cancels; and the sum of all."""
    low, high = a0 + a1, a2 + a3
    return [a1 + high, a0 + high, low + a3, low + a2], low + high


def _draw(weights: Sequence[Tensor], uniform: Tensor) -> Tensor:
    """Which of four, with probability in proportion to its weight."""
    end0 = weights[0]
    end1 = end0 + weights[1]
    end2 = end1 + weights[2]
    point = uniform * (end2 + weights[3])
    return (end0 <= point).int() + (end1 <= point) + (end2 <= point)


_ESTIMATORS: dict[tuple[int, int, str], Callable[..., Tensor]] = {
    (2, 4, "exact"): _mvue_24,
    (2, 4, "approx"): _mvue_24_approx,
    (1, 2, "exact"): _mvue_12,
}
