"""Triton: FP8 with one current scale per tensor, in two passes over it and without waiting for the device.

The first pass computes the largest magnitude as the bits of an fp32 number. Bits of magnitudes compare as the
magnitudes do, with inf above every number and NaN above inf, so one integer maximum per program finds the same bits in
any order. Every program of the second pass computes the scale from these bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from .groups import cast, limits, on_its_device

_LAUNCH = {"BLOCK": 4096, "num_warps": 8, "enable_fp_fusion": False}
"""Without fused multiply-add, so that the bits are those of the reference."""

_READERS = 1024
"""Programs of the first pass, at most: about what a large GPU runs at once. Each adds one atomic operation."""

_FORMATS = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5}


@on_its_device
def fp8_quantize(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Two reads of `x`, one write of the result; the scale stays on the device."""
    values = torch.empty_like(x, dtype=reference.fp8.FORMATS[format])
    scale = torch.empty((), dtype=torch.float32, device=x.device)
    _round(x, format, values, scale)
    return values, scale


@on_its_device
def fp8_simulate(x: Tensor, format: str) -> Tensor:
    """Two reads of `x`, one write of the result. NaN or inf in `x` make all of it NaN."""
    values = torch.empty_like(x)
    _round(x, format, values, None)
    return values


def _round(x: Tensor, format: str, values: Tensor, scale: Tensor | None) -> None:
    """Fill `values`, and the scale where there is one to fill."""
    if x.stride() != values.stride():
        x = torch.empty_like(x).copy_(x)  # results are dense: now both are, in one layout
    size = x.numel()
    blocks = triton.cdiv(size, _LAUNCH["BLOCK"])
    amax = torch.zeros((), dtype=torch.int32, device=x.device)
    if size:
        _amax_kernel[(min(blocks, _READERS),)](x, amax, size, **_LAUNCH)
    if size or scale is not None:  # an empty tensor has a scale
        _round_kernel[(max(blocks, 1),)](
            x,
            amax,
            values,
            scale,
            size,
            FORMAT=_FORMATS[format],
            MAX=torch.finfo(reference.fp8.FORMATS[format]).max,
            TINY=limits(values.dtype)["TINY"],
            **_LAUNCH,
        )


@triton.jit
def _amax_kernel(x, amax, size, BLOCK: tl.constexpr):
    ALL: tl.constexpr = tl.PropagateNan.ALL
    largest = tl.zeros((BLOCK,), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        i = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.abs(tl.load(x + i, mask=i < size, other=0.0).to(tl.float32)), ALL)
    # Magnitudes once more: a NaN may have come with a sign.
    tl.atomic_max(amax, tl.max(tl.abs(largest).to(tl.int32, bitcast=True)), sem="relaxed")


@triton.jit
def _round_kernel(
    x,
    amax,
    values,
    scale,
    size,
    FORMAT: tl.constexpr,
    MAX: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Rounded twice, as PyTorch divides a number by a tensor. Zeros, and values so small that their scale would
    # overflow, get the largest finite scale; NaN stays.
    s = tl.div_rn(1.0, tl.load(amax).to(tl.float32, bitcast=True)) * MAX
    s = tl.minimum(s, 3.4028234663852886e38, tl.PropagateNan.ALL)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # Nothing to clamp: amax * s is MAX give or take one rounding.
    y = tl.load(x + i, mask=i < size, other=0.0).to(tl.float32) * s
    if scale is not None:
        if tl.program_id(0) == 0:
            tl.store(scale, s)
        tl.store(values + i, cast(y, FORMAT, None, TINY), mask=i < size)
    else:
        y = y.to(FORMAT).to(tl.float32)
        DTYPE: tl.constexpr = values.dtype.element_ty
        if (s > 2.0**-100) & (s < 2.0**100):
            tl.store(values + i, cast(_divide(y, s), DTYPE, None, TINY), mask=i < size)
        else:
            tl.store(values + i, cast(tl.div_rn(y, s), DTYPE, None, TINY), mask=i < size)


@triton.jit
def _divide(y, s):
    """y / s for values of an FP8 format, rounded to nearest even, where nothing overflows or is subnormal.

    One division per program instead of one per element: y * (1 / s) and one correction, after which the rounding is
    always correct. Verified for every significand of s with each of the eight significands of FP8.
    """
    r = tl.div_rn(1.0, s)
    q = y * r
    return tl.fma(tl.fma(-q, s, y), r, q)
