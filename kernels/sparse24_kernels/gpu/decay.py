"""Triton: masked decay of all weights of a model in one launch."""

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from .batch import BLOCK, address_table, aligned_pointer, block_table, field, my_block, served

_TRITON = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def masked_decay_(grads: list[Tensor], weights: list[Tensor], masks: list[Tensor], alphas: list[float]) -> None:
    """One launch per combination of dtypes: gradient and weight are read once, the gradient written once."""
    launches: dict[tuple, list[tuple[int, ...]]] = {}
    for grad, weight, mask, alpha in zip(grads, weights, masks, alphas):
        if mask.dtype == torch.uint8 and weight.shape[-1] % 8:
            mask = reference.masks.as_bool(mask, weight)  # bits whose rows end inside a byte
        if not served(grad, weight, mask) or grad.dtype not in _TRITON or weight.dtype not in _TRITON:
            reference.decay.masked_decay_([grad], [weight], [mask], [alpha])
            continue
        alpha_bits = struct.unpack("i", struct.pack("f", alpha))[0]
        row = (grad.data_ptr(), weight.data_ptr(), mask.data_ptr(), weight.numel(), alpha_bits)
        launches.setdefault((grad.dtype, weight.dtype, mask.dtype), []).append(row)
    for (grad_dtype, weight_dtype, mask_dtype), rows in launches.items():
        device = weights[0].device
        blocks = block_table([row[3] for row in rows], device)
        _decay_kernel[(len(blocks),)](
            address_table(rows, device),
            blocks,
            GRAD=_TRITON[grad_dtype],
            WEIGHT=_TRITON[weight_dtype],
            BITS=mask_dtype == torch.uint8,
            BLOCK=BLOCK,
        )


@triton.jit
def _decay_kernel(table, blocks, GRAD: tl.constexpr, WEIGHT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    tensor, block = my_block(blocks)
    grad = aligned_pointer(field(table, tensor, 5, 0), GRAD)
    weight = aligned_pointer(field(table, tensor, 5, 1), WEIGHT)
    mask = aligned_pointer(field(table, tensor, 5, 2), tl.uint8)
    size = tl.multiple_of(field(table, tensor, 5, 3), 16)
    alpha = field(table, tensor, 5, 4).to(tl.int32).to(tl.float32, bitcast=True)
    at = block * BLOCK + tl.arange(0, BLOCK)
    if BITS:
        byte = block * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
        packed = tl.load(mask + byte, mask=byte < size // 8, other=0).to(tl.int32)
        keep = ((packed.expand_dims(1) >> tl.arange(0, 8)[None, :]) & 1).reshape(BLOCK) != 0
    else:
        keep = tl.load(mask + at, mask=at < size, other=1) != 0
    w = tl.load(weight + at, mask=at < size, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=at < size, other=0.0).to(tl.float32)
    # A product, as in the reference: a NaN or inf in a weight shows in its gradient, kept or not.
    pull = w * tl.where(keep, 0.0, 1.0)
    tl.store(grad + at, (g + alpha * pull).to(GRAD), mask=at < size)
