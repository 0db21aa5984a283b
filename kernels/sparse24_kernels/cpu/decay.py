"""Masked decay by the kernels for CPUs: fp32, on paths with fused multiply-add; everything else by the reference."""

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from .. import reference
from .library import loaded
from .prune import run

_LARGEST = torch.finfo(torch.float32).max


def masked_decay_(grads: list[Tensor], weights: list[Tensor], masks: list[Tensor], alphas: list[float]) -> None:
    """grad += alpha * (1 - mask) * weight, in place, for each."""
    for grad, weight, mask, alpha in zip(grads, weights, masks, alphas):
        if not _has_kernel(grad, weight, alpha):
            reference.decay.masked_decay_([grad], [weight], [mask], [alpha])
            continue
        run("decay" if mask.dtype == torch.bool else "decay-bits", weight, grad, mask=mask, scale=alpha)
        increment_version(grad)


def _has_kernel(grad: Tensor, weight: Tensor, alpha: float) -> bool:
    """Whether the kernel may write into `grad` what PyTorch would, which autograd and tracing do not see."""
    plain = all(type(x) in (Tensor, nn.Parameter) and x.dtype == torch.float32 for x in (grad, weight))
    if not plain or grad.shape != weight.shape or not grad.is_contiguous() or grad.is_inference():
        return False
    if torch.is_grad_enabled() and (grad.requires_grad or weight.requires_grad):
        return False
    return abs(alpha) <= _LARGEST and loaded().path != "portable"
