"""Triton: masked decay."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from .groups import LAUNCH, on_its_device

BLOCK = 2048
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@on_its_device
def masked_decay_(grad: Tensor, weight: Tensor, mask: Tensor, alpha: float) -> None:
    """One read of gradient, weight and mask, one write of the gradient, in one launch for each weight: 12 1/8 bytes an
    element of fp32 with packed bits, 6 1/8 of 16 bits. Tensors that do not lie element by element are the reference's.
    """
    bits = mask.dtype == torch.uint8
    fits = all(x.is_contiguous() for x in (grad, weight, mask)) and not (bits and grad.shape[-1] % 8)
    if not fits or weight.dtype not in _DTYPES or abs(alpha) > torch.finfo(torch.float32).max:
        return reference.masks.masked_decay_(grad, weight, mask, alpha)
    if grad.is_cpu and grad.dtype == weight.dtype:  # in the interpreter; on CPUs alone, torch rounds it to 16 bits
        alpha = torch.tensor(alpha, dtype=grad.dtype, device="cpu").item()
    if count := grad.numel():
        grid = (triton.cdiv(count, BLOCK),)
        _decay_kernel[grid](grad, weight, mask, alpha, count, BITS=bits, SIZE=BLOCK, **LAUNCH)


@triton.jit
def _decay_kernel(grad, weight, mask, alpha, count, BITS: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < count
    if BITS:
        kept = (tl.load(mask + at // 8, mask=inside, other=0).to(tl.int32) >> (at % 8).to(tl.int32)) & 1
    else:
        kept = tl.load(mask + at, mask=inside, other=0).to(tl.int32)
    x = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    x = x * tl.where(kept != 0, 0.0, 1.0)  # NaN and inf times 0 are NaN
    y = tl.fma(x, tl.full(x.shape, 1.0, tl.float32) * alpha, y)  # as torch's `add_`, rounded once
    tl.store(grad + at, y.to(grad.dtype.element_ty), mask=inside)
