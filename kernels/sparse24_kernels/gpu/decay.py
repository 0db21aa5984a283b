"""Triton: masked decay of all weights of a model in one launch."""

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference
from .batch import BLOCK, UNIT, block_table, is_vectorizable, my_block, offset, pointer_at, table_entry, tensor_table
from .groups import on_its_device

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@on_its_device
def masked_decay_(grads: list[Tensor], weights: list[Tensor], masks: list[Tensor], alphas: list[float]) -> None:
    """One launch per combination of dtypes: gradient and weight are read once, the gradient written once."""
    launches: dict[tuple[torch.dtype, ...], list[tuple[Tensor, Tensor, Tensor, float]]] = {}
    for grad, weight, mask, alpha in zip(grads, weights, masks, alphas):
        if mask.dtype == torch.uint8 and weight.shape[-1] % 8:
            mask = reference.masks.as_bool(mask, weight)  # bits whose rows end inside a byte
        if is_vectorizable(grad, weight, mask) and grad.dtype in _DTYPES and weight.dtype in _DTYPES:
            launches.setdefault((grad.dtype, weight.dtype, mask.dtype), []).append((grad, weight, mask, alpha))
        else:
            reference.decay.masked_decay_([grad], [weight], [mask], [alpha])
    for quadruples in launches.values():
        first_grad, first_weight, first_mask, _ = quadruples[0]
        rows = [
            (
                offset(grad, first_grad),
                offset(weight, first_weight),
                offset(mask, first_mask),
                weight.numel() // UNIT,
                struct.unpack("i", struct.pack("f", alpha))[0],
            )
            for grad, weight, mask, alpha in quadruples
        ]
        blocks = block_table([weight.numel() for _, weight, _, _ in quadruples], first_weight.device)
        _decay_kernel[(len(blocks),)](
            first_grad,
            first_weight,
            first_mask.view(torch.uint8),
            tensor_table(rows, first_weight.device),
            blocks,
            BITS=first_mask.dtype == torch.uint8,
            BLOCK=BLOCK,
            enable_fp_fusion=True,
        )


@triton.jit
def _decay_kernel(grads, weights, masks, table, blocks, BITS: tl.constexpr, BLOCK: tl.constexpr):
    tensor, block = my_block(blocks)
    grad = pointer_at(grads, table_entry(table, tensor, 5, 0))
    weight = pointer_at(weights, table_entry(table, tensor, 5, 1))
    mask = pointer_at(masks, table_entry(table, tensor, 5, 2))
    size = table_entry(table, tensor, 5, 3) * 16
    alpha = table_entry(table, tensor, 5, 4).to(tl.int32).to(tl.float32, bitcast=True)
    element = block * BLOCK + tl.arange(0, BLOCK)
    if BITS:
        byte = block * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
        packed = tl.load(mask + byte, mask=byte < size // 8, other=0).to(tl.int32)
        keep = (packed.expand_dims(1) & (1 << tl.arange(0, 8))[None, :]).reshape(BLOCK) != 0
    else:
        keep = tl.load(mask + element, mask=element < size, other=1) != 0
    w = tl.load(weight + element, mask=element < size, other=0.0).to(tl.float32)
    g = tl.load(grad + element, mask=element < size, other=0.0).to(tl.float32)
    # Multiplied, as in the reference: a NaN or inf in a weight shows in its gradient, kept or not.
    pull = w * tl.where(keep, 0.0, 1.0)
    tl.store(grad + element, (g + alpha * pull).to(grad.dtype.element_ty), mask=element < size)
