"""Masked decay: pulls pruned weights towards zero through the gradient."""

from torch import Tensor

from .masks import as_bool


def masked_decay_(grads: list[Tensor], weights: list[Tensor], masks: list[Tensor], alphas: list[float]) -> None:
    """grad += alpha * (1 - mask) * weight, in place, for each."""
    for grad, weight, mask, alpha in zip(grads, weights, masks, alphas):
        # In the weight's precision or the gradient's, whichever is higher, and rounded once.
        grad.add_(weight * ~as_bool(mask, weight), alpha=alpha)
