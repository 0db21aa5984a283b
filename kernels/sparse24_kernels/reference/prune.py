"""Pruning: hard by a mask, soft by S-STE's threshold; the result dense or transposed."""

import torch
from torch import Tensor

from ..operators import Pruning
from .masks import as_bool, nm_mask
from .packed import in_form


def prune(weight: Tensor, how: Pruning) -> list[Tensor]:
    """The pruned weight in each form."""
    rule, n, m, dim, mask, scale, dtype, forms = how
    if rule == "soft-threshold":
        pruned = soft_threshold(weight, n, m, dim, scale)
    else:
        keep = nm_mask(weight, n, m, dim, packed=False) if mask is None else as_bool(mask, weight)
        # Multiplied, so that a NaN shows even where it is masked.
        pruned = weight * keep
    # Zero is added after the cast, which may round a small negative value to -0.0.
    pruned = pruned.to(dtype).add_(0.0)
    return [in_form(pruned, form) for form in forms]


def soft_threshold(weight: Tensor, n: int, m: int, dim: int, scale: Tensor | None) -> Tensor:
    """sign(w) * max(|w| - t, 0) * scale, not rounded, with t the (m-n)-th smallest magnitude of the group."""
    values, member = wide(weight).unflatten(dim, (-1, m)), dim + 1
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
    return pruned.reshape(weight.shape)


def wide(x: Tensor) -> Tensor:
    """In the precision that operations compute in: fp64 stays, anything else is fp32."""
    return x if x.dtype == torch.float64 else x.float()


def s_ste_scale(weight: Tensor, n: int, m: int, dim: int, rule: str) -> Tensor:
    """The factor that S(W) is multiplied with, as an fp32 scalar; 1.0 where S(W) is all zeros."""
    weight = wide(weight)
    pruned = soft_threshold(weight, n, m, dim, None)
    if rule == "mse":
        wanted, kept = (weight * pruned).sum(), pruned.square().sum()
    else:
        wanted, kept = weight.abs().sum(), pruned.abs().sum()
    return torch.where(kept == 0, 1.0, wanted / kept).float()
