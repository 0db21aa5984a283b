"""FP8 operands, simulated in the tensor's own dtype."""

import torch
from torch import Tensor

from . import reference
from .checks import check_floating, check_one_of

FP8_FORMATS = ("e4m3", "e5m2")
"""Names of the FP8 formats: `"e4m3"` with the largest value 448, `"e5m2"` with 57344."""


def fp8_simulate(x: Tensor, format: str) -> Tensor:
    """`x` rounded to FP8, `"e4m3"` (max 448, forward) or `"e5m2"` (max 57344, backward), with one scale per tensor.

    A simulation in the dtype and strides of `x`: times `s = max / amax`, rounded to nearest even, over s, in fp32.
    Zeros stay zeros, never -0.0. One NaN or inf makes all NaN, so that a GradScaler skips the step. Not differentiable.

    Reference: S-STE (arXiv 2409.09099) and its public code, which divides by zero where ours keeps zeros.
    """
    check_floating("fp8_simulate", x=x)
    check_one_of(FP8_FORMATS, format=format)
    return _fp8_simulate(x, format)


# A custom operator, so that compiled code rounds as eager code does.
@torch.library.custom_op("sparse24::fp8_simulate", mutates_args=())
def _fp8_simulate(x: Tensor, format: str) -> Tensor:
    return reference.fp8.fp8_simulate(x, format)


@_fp8_simulate.register_fake
def _(x: Tensor, format: str) -> Tensor:
    return torch.empty_like(x)
