"""FP8 operands, simulated in the tensor's own dtype."""

import torch
from torch import Tensor

from .checks import check_floating, check_one_of

_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FP8_FORMATS = tuple(_DTYPES)
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


def _fp8_quantize(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """x * s rounded to nearest even, laid out as `x`, and s = max / amax as an fp32 scalar."""
    dtype = _DTYPES[format]
    values = x.float()
    amax = values.abs().amax() if x.numel() else values.new_zeros(())
    # Clamped for tensors of zeros, and of values so small that the scale overflows.
    scale = (torch.finfo(dtype).max / amax).clamp(max=torch.finfo(torch.float32).max)
    limit = torch.finfo(dtype).max
    bits = (values * scale).clamp_(-limit, limit).to(dtype).view(torch.uint8)
    return bits.masked_fill_(bits == 128, 0).view(dtype), scale  # never -0.0


# A custom operator, so that compiled code rounds as eager code does.
@torch.library.custom_op("sparse24::fp8_simulate", mutates_args=())
def _fp8_simulate(x: Tensor, format: str) -> Tensor:
    quantized, scale = _fp8_quantize(x, format)
    # Adding zero after the cast, which may round a small negative value to -0.0.
    return torch.empty_like(x).copy_(quantized.float() / scale).add_(0.0)


_fp8_simulate.register_fake(lambda x, format: torch.empty_like(x))
