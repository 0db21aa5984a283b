"""FP8 operands: quantised for a GEMM, or simulated in the tensor's own dtype."""

import torch
from torch import Tensor

from . import reference
from .checks import check_floating, check_one_of

FP8_FORMATS = ("e4m3", "e5m2")
"""Names of the FP8 formats: `"e4m3"` with the largest value 448, `"e5m2"` with 57344."""


def fp8_quantize(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Round to FP8 with one current scale for the tensor: `s = max / amax`, amax the largest magnitude of `x`.

    Args:
        x: any floating dtype, shape and strides. Computed in fp32, fp64 too: eight bits hold no more, but a magnitude
            beyond fp32 counts as inf.
        format: `"e4m3"` (`torch.float8_e4m3fn`, max 448, for forward operands) or `"e5m2"` (`torch.float8_e5m2`, max
            57344, for backward operands).

    Returns:
        The quantised tensor, shape and (where dense) strides of `x`, never -0.0, so that sparse stays sparse; and the
        fp32 scalar s, by which the result of a GEMM with it must be divided. A tensor of zeros has the largest finite
        s. Where `x` holds NaN the scale is NaN, where it holds inf the scale is 0; neither synchronises the device.

    Raises:
        ValueError: another `format`, or an `x` that is no tensor of fp64, fp32, bf16 or fp16.

    Reference: S-STE (arXiv 2409.09099), section 5; Micikevicius et al. 2022 (arXiv 2209.05433) for the formats.

    Examples:
        >>> fp8_quantize(torch.tensor([1.0, -2.0]), "e4m3")
        (tensor([ 224., -448.], dtype=torch.float8_e4m3fn), tensor(224.))
    """
    check_floating("fp8_quantize", x=x)
    check_one_of(FP8_FORMATS, format=format)
    return reference.fp8.fp8_quantize(x, format)


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
