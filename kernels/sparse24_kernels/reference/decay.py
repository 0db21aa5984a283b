"""Masked decay: pulls pruned weights towards zero through the gradient."""

from torch import Tensor

from .masks import as_bool


def masked_decay_(grad: Tensor, weight: Tensor, mask: Tensor, alpha: float) -> None:
    """grad += alpha * (1 - mask) * weight, in place."""
    # In the weight's precision or the gradient's, whichever is higher, and rounded once.
    grad.add_(weight * ~as_bool(mask, weight), alpha=alpha)
