"""FP8 operands, simulated in the tensor's own dtype."""

import torch
from torch import Tensor

from . import reference
from .checks import check_floating, check_one_of

FP8_FORMATS = ("e4m3", "e5m2")
"""Names of the FP8 formats: `"e4m3"` with the largest value 448, `"e5m2"` with 57344."""


def fp8_simulate(x: Tensor, format: str) -> Tensor:
    """`x` rounded to FP8 with one current scale per tensor, in its own dtype.

    Simulation: the result has the dtype of `x`, so the GEMMs that follow run as before. Values are multiplied by
    `s = max / amax`, rounded to nearest even, and divided by s, in fp32 (fp64 too).

    Args:
        x: any floating dtype, shape and strides. Not differentiable: meant for the inside of an autograd
            function.
        format: `"e4m3"` (max 448, for forward operands) or `"e5m2"` (max 57344, for backward operands).

    Returns:
        Shape, dtype and (where dense) strides of `x`. Zeros stay zeros, never -0.0, so sparse stays sparse. All zeros,
        and empty tensors, come back as they are. One NaN or inf makes the whole result NaN, which a GradScaler finds,
        so that it skips the step and lowers its scale.

    Raises:
        ValueError: another `format`.

    Reference: S-STE (arXiv 2409.09099) and its public code, which divides by zero where ours keeps zeros.

    Examples:
        >>> fp8_simulate(torch.tensor([1.0, 0.3]), "e5m2")
        tensor([1.0000, 0.2857])
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
