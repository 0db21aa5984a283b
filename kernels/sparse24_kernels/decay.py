"""Masked decay: a term added to the gradient that pulls pruned weights towards zero."""

import sys

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from . import reference
from .checks import check_device, check_floating, check_mask, described
from .dispatch import implementation


def masked_decay_(grad: Tensor, weight: Tensor, mask: Tensor, alpha: float) -> Tensor:
    """`grad += alpha * (1 - mask) * weight`, in place: pull pruned weights towards zero through the gradient.

    Args:
        grad: the gradient, changed in place; any shape, fp64, fp32, bf16 or fp16. The result is rounded once.
        weight: same shape; may have another dtype of these.
        mask: true where the weight is kept; bool of the same shape, or its packed bits (`pack_bits`).
        alpha: lambda_W, the strength; any finite number. A negative one pushes away from zero, which the setting
            `decay_on="weight"` uses, with the weight in place of the gradient.

    Returns:
        `grad`.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit each other, or an `alpha` that is not finite.

    Reference: Hu et al. 2024 (arXiv 2404.01847), section 4.2, eq. (10).

    Examples:
        >>> weight = torch.tensor([3.0, -2.0, 1.0, 0.5])
        >>> masked_decay_(torch.zeros(4), weight, nm_mask(weight), alpha=0.5)
        tensor([0.0000, 0.0000, 0.5000, 0.2500])
    """
    check_floating("masked_decay_", grad=grad, weight=weight)
    if not isinstance(alpha, (int, float)) or not abs(alpha) <= sys.float_info.max:
        raise ValueError(f"masked_decay_: alpha={described(alpha)}: must be a finite number")
    if grad.shape != weight.shape:
        got = f"{tuple(grad.shape)} and {tuple(weight.shape)}"
        raise ValueError(f"masked_decay_ needs gradient and weight of one shape, got {got}")
    check_mask("masked_decay_", mask, weight)
    check_device("masked_decay_", grad, weight, mask)
    traced = torch.compiler.is_compiling() or any(type(x) not in (Tensor, nn.Parameter) for x in (grad, weight))
    differentiated = torch.is_grad_enabled() and (grad.requires_grad or weight.requires_grad)
    # Tracing and autograd would not see that a kernel writes, and a tensor of inference mode has no version.
    if not (traced or differentiated or grad.is_inference()):
        implementation("masked_decay_", grad)(grad, weight, mask, float(alpha))
        increment_version(grad)
    else:
        reference.masks.masked_decay_(grad, weight, mask, float(alpha))
    return grad
