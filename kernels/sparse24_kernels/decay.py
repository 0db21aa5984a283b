"""Masked decay: a term added to the gradient that pulls pruned weights towards zero."""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from .checks import by_device, check_device, check_floating, check_is, check_mask, check_tensors, described
from .dispatch import implementation


def masked_decay_(grad: Tensor, weight: Tensor, mask: Tensor, alpha: float) -> Tensor:
    """`grad += alpha * (1 - mask) * weight`, in place: pull pruned weights towards zero through the gradient.

    Args:
        grad, weight: same shape; the gradient may have another dtype. The result is rounded once.
        mask: true where the weight is kept; bool of the same shape, or its packed bits.
        alpha: lambda_W. Negative ones push away from zero; `decay_on="weight"` uses that on the weight itself.

    Returns:
        `grad`.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit each other.

    Reference: Hu et al. 2024 (arXiv 2404.01847), section 4.2, eq. (10).
    """
    check_is(Tensor, "masked_decay_", grad=grad, weight=weight, mask=mask)
    foreach_masked_decay_([grad], [weight], [mask], [alpha])
    return grad


def foreach_masked_decay_(
    grads: Sequence[Tensor], weights: Sequence[Tensor], masks: Sequence[Tensor], alphas: Sequence[float]
) -> None:
    """`masked_decay_` for many weights: where there are kernels, one launch per device for a whole model."""
    check_tensors("foreach_masked_decay_", grads=grads, weights=weights, masks=masks)
    if not isinstance(alphas, (list, tuple)):
        raise ValueError(f"foreach_masked_decay_: alphas={described(alphas)}: must be a list of numbers")
    if not len(grads) == len(weights) == len(masks) == len(alphas):
        raise ValueError(
            f"foreach_masked_decay_ needs as many gradients as weights, masks and alphas, got "
            f"{len(grads)}, {len(weights)}, {len(masks)} and {len(alphas)}"
        )
    for grad, weight, mask, alpha in zip(grads, weights, masks, alphas):
        check_floating("masked_decay_", grad=grad, weight=weight)
        if not isinstance(alpha, (int, float)) or not abs(alpha) <= sys.float_info.max:
            raise ValueError(f"masked_decay_: alpha={described(alpha)}: must be a finite number")
        if grad.shape != weight.shape:
            raise ValueError(
                f"masked_decay_ needs gradient and weight of one shape, got {tuple(grad.shape)} and "
                f"{tuple(weight.shape)}"
            )
        check_mask("masked_decay_", mask, weight)
        check_device("masked_decay_", grad, weight, mask)
    for indices in by_device(weights):
        _masked_decay_(
            *([sequence[i] for i in indices] for sequence in (grads, weights, masks, list(map(float, alphas))))
        )


@torch.library.custom_op("sparse24::masked_decay_", mutates_args={"grads"})
def _masked_decay_(
    grads: Sequence[Tensor], weights: Sequence[Tensor], masks: Sequence[Tensor], alphas: Sequence[float]
) -> None:
    implementation(weights[0]).decay.masked_decay_(grads, weights, masks, alphas)


@_masked_decay_.register_fake
def _(grads: Sequence[Tensor], weights: Sequence[Tensor], masks: Sequence[Tensor], alphas: Sequence[float]) -> None:
    return None
