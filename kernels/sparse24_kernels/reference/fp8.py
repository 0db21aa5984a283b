"""FP8 with one current scale per tensor, which maps the largest magnitude to the format's largest value."""

import torch
from torch import Tensor

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
"""Four exponent and three mantissa bits, up to 448; five and two, up to 57344."""


def fp8_quantize(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """x * s rounded to nearest even, laid out as `x`, and s = max / amax as an fp32 scalar."""
    dtype = FORMATS[format]
    values = x.float()
    amax = values.abs().amax() if x.numel() else values.new_zeros(())
    # Clamped for tensors of zeros, and of values so small that the scale overflows.
    scale = (torch.finfo(dtype).max / amax).clamp(max=torch.finfo(torch.float32).max)
    limit = torch.finfo(dtype).max
    bits = (values * scale).clamp_(-limit, limit).to(dtype).view(torch.uint8)
    return bits.masked_fill_(bits == 128, 0).view(dtype), scale  # never -0.0


def fp8_simulate(x: Tensor, format: str) -> Tensor:
    """The round trip, in the dtype and layout of `x`; all NaN where any value is NaN or inf."""
    quantized, scale = fp8_quantize(x, format)
    # Adding zero after the cast, which may round a small negative value to -0.0.
    return torch.empty_like(x).copy_(quantized.float() / scale).add_(0.0)
