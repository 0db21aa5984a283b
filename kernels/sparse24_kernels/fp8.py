"""FP8 simulation: what rounding a tensor to eight bits does to its values, in plain PyTorch."""

import torch
from torch import Tensor

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
"""Four exponent and three mantissa bits, up to 448; five and two, up to 57344."""


# A custom op, because it looks at its values (on a GPU a synchronisation), which torch.compile cannot trace.
@torch.library.custom_op("sparse24::fp8_simulate", mutates_args=())
def fp8_simulate(x: Tensor, format: str) -> Tensor:
    """Scale the largest magnitude to the format's largest value, round to nearest even, and scale back; in fp32."""
    if x.numel() == 0:
        return torch.empty_like(x)
    dtype = FORMATS[format]
    values = x.float()
    amax = values.abs().amax()
    if not torch.isfinite(amax):
        bad = int((~torch.isfinite(values)).sum())
        raise ValueError(
            f"fp8_simulate: {bad} of {x.numel()} values of a tensor of shape {tuple(x.shape)} are NaN or inf, which "
            f"no FP8 scale fits; find what overflowed before it (learning rate or loss scale too large?), "
            f"or turn FP8 off"
        )
    # The clamp is for a tensor of zeros, and for one so small that the scale overflows.
    scale = (torch.finfo(dtype).max / amax).clamp(max=torch.finfo(torch.float32).max)
    rounded = (values * scale).to(dtype).float() / scale
    # Adding zero after the cast, which may round a small negative value to -0.0.
    return torch.empty_like(x).copy_(rounded).add_(0.0)


@fp8_simulate.register_fake
def _(x: Tensor, format: str) -> Tensor:
    return torch.empty_like(x)
