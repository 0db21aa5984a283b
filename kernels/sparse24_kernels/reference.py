"""The specification: every operation in plain PyTorch, on any device, at fp32 or better.

These functions define what the library computes. They are the CPU path, and the oracle that any faster kernel is
tested against. Shapes: `[..., K]` means any leading dimensions; a *group* is M consecutive elements along `dim`.

Results that the papers leave open are fixed here, for every function:

* ties keep the element with the lower index, and exactly N of M are kept;
* a NaN counts as the largest magnitude, so it is kept and stays visible;
* a zero is written as +0.0, never -0.0 (some sparse compressors count -0.0 as a value).
"""

import torch
from torch import Tensor


def _groups(x: Tensor, m: int, dim: int) -> Tensor:
    """View `dim` (size K) as two dimensions `[K/m, m]`, in place of `dim`."""
    return x.unflatten(dim, (-1, m))


def _member_dim(dim: int) -> int:
    """Where the m members of a group stand after `_groups(x, m, dim)`."""
    return dim if dim < 0 else dim + 1


def _magnitude(weight: Tensor) -> Tensor:
    """|weight| as a key to compare by: NaN and inf are both +inf, the largest."""
    return weight.abs().nan_to_num(nan=torch.inf, posinf=torch.inf)


def _majority(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a & b) | (c & (a | b))


def _two_largest_of_four(a0: Tensor, a1: Tensor, a2: Tensor, a3: Tensor) -> list[Tensor]:
    """Booleans that mark the two largest of four, ties to the lower index, without sorting.

    An element is among the two largest when it wins at least two of its three comparisons. `>=` in favour of the
    lower index makes the order strict, so exactly two elements win.
    """
    w01, w02, w03, w12, w13, w23 = a0 >= a1, a0 >= a2, a0 >= a3, a1 >= a2, a1 >= a3, a2 >= a3
    return [
        _majority(w01, w02, w03),
        _majority(~w01, w12, w13),
        _majority(~w02, ~w12, w23),
        _majority(~w03, ~w13, ~w23),
    ]


def nm_mask(weight: Tensor, n: int, m: int, dim: int) -> Tensor:
    """Keep the n largest magnitudes of each group of m: bool, same shape as `weight`."""
    magnitude, member = _groups(_magnitude(weight), m, dim), _member_dim(dim)
    if (n, m) == (2, 4):
        # Six comparisons instead of a sort: about 20 times faster on a CPU, and equal to it (tested exhaustively).
        keep = torch.stack(_two_largest_of_four(*magnitude.unbind(member)), member)
    else:
        order = magnitude.sort(dim=member, descending=True, stable=True).indices
        keep = torch.zeros_like(magnitude, dtype=torch.bool).scatter(member, order.narrow(member, 0, n), True)
    return keep.reshape(weight.shape)


def apply_mask(weight: Tensor, mask: Tensor) -> Tensor:
    """`weight * mask` without -0.0."""
    # A product, so that a NaN shows even where it is masked; adding zero turns -0.0 into +0.0.
    return (weight * mask).add_(0.0)


def soft_threshold(weight: Tensor, n: int, m: int, dim: int, scale: Tensor | None) -> Tensor:
    """sign(w) * max(|w| - t, 0) * scale, with t the (m-n)-th smallest magnitude of the group."""
    values, member = _groups(weight.float(), m, dim), _member_dim(dim)
    if (n, m) == (2, 4):
        a0, a1, a2, a3 = (part.abs() for part in values.unbind(member))
        lows = torch.maximum(torch.minimum(a0, a1), torch.minimum(a2, a3))
        highs = torch.minimum(torch.maximum(a0, a1), torch.maximum(a2, a3))
        threshold = torch.minimum(lows, highs).unsqueeze(member)  # the second smallest of four
    else:
        threshold = values.abs().sort(dim=member).values.narrow(member, m - n - 1, 1)
    # w - clamp(w, -t, t) is the soft threshold, and lets NaN through. In place: on a CPU, fresh memory costs more
    # than the arithmetic.
    pruned = values.clamp(-threshold, threshold).neg_().add_(values)
    if scale is not None:
        pruned = pruned.mul_(scale)
    # After the cast, which may round a small negative value to -0.0.
    return pruned.reshape(weight.shape).to(weight.dtype).add_(0.0)


def s_ste_scale(weight: Tensor, n: int, m: int, dim: int, rule: str) -> Tensor:
    """The factor that S(W) is multiplied with, as an fp32 scalar; 1.0 where S(W) is all zeros."""
    weight = weight.float()
    pruned = soft_threshold(weight, n, m, dim, None)
    if rule == "mse":
        wanted, kept = (weight * pruned).sum(), pruned.square().sum()
    elif rule == "l1":
        wanted, kept = weight.abs().sum(), pruned.abs().sum()
    else:
        wanted = kept = weight.new_ones(())
    return torch.where(kept == 0, 1.0, wanted / kept)


def mvue_24(x: Tensor, uniform: Tensor, dim: int) -> Tensor:
    """Exact 2:4 MVUE by systematic sampling; `uniform` holds one number of [0, 1) per group.

    With magnitudes a, sum S and largest M, let T = min(S/2, S - M). Then b_i = min(a_i, T) sums to 2T, the optimal
    inclusion probability is b_i / T, and the unbiased value of a kept element is sign(x_i) * max(a_i, T): the largest
    element is kept as it is when it outweighs the other three, and everything else counts as T. Laying the b_i end to
    end and keeping those that the two points u*T and (u + 1)*T fall into picks exactly two.
    """
    values, member = _groups(x.float(), 4, dim), _member_dim(dim)
    a = values.abs()
    a0, a1, a2, a3 = a.unbind(member)
    high01, high23 = torch.maximum(a0, a1), torch.maximum(a2, a3)
    largest = torch.maximum(high01, high23)
    # Summed from its own three terms: S - M would cancel to nothing beside one huge value. In place from here on: on
    # a CPU, fresh memory costs more than the arithmetic.
    others = torch.minimum(high01, high23).add_(torch.minimum(a0, a1)).add_(torch.minimum(a2, a3))
    pick = torch.minimum(largest.mul_(0.5).add_(others, alpha=0.5), others)  # T
    end0 = torch.minimum(a0, pick)
    end1 = torch.minimum(a1, pick).add_(end0)
    end2 = torch.minimum(a2, pick).add_(end1)
    first = uniform * pick
    second = first + pick
    # "by i" means: the point falls into the elements 0 to i. The first is always by 2, the second never by 0.
    first_by0, first_by1 = first < end0, first < end1
    second_by1, second_by2 = second < end1, second < end2
    # A group with one non-zero has T = 0 and no length to sample from: it is kept as it is.
    alone = pick == 0
    keep = [
        first_by0 | alone,
        (first_by1 & ~first_by0) | second_by1 | alone,
        (~first_by1 | (second_by2 & ~second_by1) | alone).logical_and_(a2),  # where rounding lets a point
        (~second_by2 | alone).logical_and_(a3),  # pass the last non-zero, a zero must not be picked
    ]
    kept = torch.stack(keep, member)
    # A product drops the others faster than masked_fill_ does; adding zero turns its -0.0 into +0.0.
    estimate = torch.maximum(a, pick.unsqueeze(member), out=a).copysign_(values).mul_(kept).add_(0.0)
    return estimate.reshape(x.shape).to(x.dtype)


def mvue_12(x: Tensor, uniform: Tensor, dim: int) -> Tensor:
    """Exact 1:2 MVUE: keep x_i with probability |x_i| / (|x_0| + |x_1|), as sign(x_i) * (|x_0| + |x_1|)."""
    values, member = _groups(x.float(), 2, dim), _member_dim(dim)
    a0, a1 = values.abs().unbind(member)
    total = a0 + a1
    first = uniform * total < a0
    # `logical_and` keeps a zero from being picked where uniform * total rounds up to a0.
    kept = torch.stack([first.logical_and(a0), (~first).logical_and(a1)], member)
    estimate = total.unsqueeze(member).expand_as(values).copysign(values).mul_(kept).add_(0.0)
    return estimate.reshape(x.shape).to(x.dtype)


def mvue_24_approx(x: Tensor, uniform: Tensor, dim: int) -> Tensor:
    """The two-draw 2:4 estimate; `uniform` holds two numbers per group, along a last dimension of 2.

    Draw i with probability |x_i| / S, then j != i with |x_j| / (S - |x_i|), and divide both by the exact probability
    of being drawn at all, p_i = |x_i| / S + |x_i| (K - k_i) with k_i = |x_i| / (S (S - |x_i|)) and K = sum k.
    """
    member = _member_dim(dim)
    values = _groups(x.double(), 4, dim).movedim(member, -1)
    a = values.abs()
    without_own = 1 - torch.eye(4, dtype=a.dtype, device=a.device)  # sums that leave an element out, not cancelled
    others = a @ without_own
    share = a / a.sum(-1, keepdim=True)
    k = torch.where(others > 0, share / others, 0.0)
    probability = share + a * (k @ without_own)
    first = _draw(a, uniform[..., :1])
    second = _draw(a.scatter(-1, first, 0.0), uniform[..., 1:])
    drawn = torch.zeros_like(a).scatter_(-1, first, 1.0).scatter_(-1, second, 1.0)
    # Where x is 0 nothing is kept: a zero is drawn only where fewer than two others are left, or by rounding.
    estimate = torch.where(values == 0, 0.0, values / probability * drawn).add_(0.0)
    return estimate.movedim(-1, member).reshape(x.shape).to(x.dtype)


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """One index per group `[..., 4]` with probability in proportion to `weights`: int64 `[..., 1]`."""
    ends = weights.cumsum(-1)
    return (ends <= uniform * ends[..., -1:]).sum(-1, keepdim=True).clamp(max=3)


def masked_decay_(grad: Tensor, weight: Tensor, mask: Tensor, alpha: float) -> Tensor:
    """grad += alpha * (1 - mask) * weight, in place."""
    return grad.add_((weight * ~mask).to(grad.dtype), alpha=alpha)


def pack_bits(mask: Tensor) -> Tensor:
    """bool `[..., K]` -> uint8 `[..., ceil(K/8)]`; bit j of byte i is element 8i + j, missing elements are 0."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 8)).unflatten(-1, (-1, 8))
    weights = 2 ** torch.arange(8, device=mask.device, dtype=torch.uint8)
    return (padded * weights).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, size: int) -> Tensor:
    """The inverse of `pack_bits`: uint8 `[..., ceil(size/8)]` -> bool `[..., size]`."""
    shifts = torch.arange(8, device=packed.device, dtype=torch.uint8)
    return (packed.unsqueeze(-1) >> shifts & 1).bool().flatten(-2)[..., :size]
