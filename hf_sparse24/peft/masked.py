"""The GEMM of a LoRA adapter that acts through the mask of the base weight.

    Z = X Ws^T + X D^T        D = M * (s B A),  M = (Ws != 0)

Ws `[out, in]` is the weight that the base layer computes with, A `[r, in]` and B `[out, r]` are the adapter's, s its
scaling. Ws + D has the zeros of Ws, so it is as sparse, and one weight can take the place of both: a merge changes
nothing but rounding. The gradients are those of D, masked:

    dX = dZ D        dB = s (M * dZ^T X) A^T        dA = s B^T (M * dZ^T X)

X Ws^T is the base layer's own GEMM. That of D is not fused with it: bf16 has too few bits for a weight and the small
changes that an adapter learns, and the sum Ws + D rounds a part of them away.

D and dZ^T X are as large as the weight, so they are computed for `CHUNK` elements at a time, a block of output rows,
and D again in the backward pass. This costs three GEMMs of the weight's size per training step, one in inference, and
the memory of four tensors of CHUNK elements.

References: SPP (arXiv 2405.16057) and SQFT (arXiv 2410.03750) mask adapters; LoRS (arXiv 2501.08582) recomputes them.
Deviation: SQFT multiplies by the sum Ws + D.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..layers.sparse_module import SparseModule, reject_transforms
from ..weights.encodings import Wanted
from ..weights.gemms import PRUNED
from ..weights.input_dim import input_dim_of

CHUNK = 2**22  # elements of D that are computed at a time
ALL = slice(None)


@torch.no_grad()
def weight_of(layer: Any, dtype: torch.dtype) -> Tensor:
    """Return the weight `[out, in]` that a linear layer multiplies by; the caller must not change it. Of a sparse
    layer, whose GEMM is in `dtype`, it is the layer's own encoding."""
    if is_pruned(layer):
        (weight,) = layer.sparse24["weight"].encoded([Wanted(PRUNED)], dtype)
        return weight
    return out_in(layer, layer.weight.detach())


def is_pruned(layer: nn.Module) -> bool:
    """Return whether a layer is a sparse one that now computes with a pruned weight, not with its dense master."""
    return isinstance(layer, SparseModule) and not layer.sparse24["weight"].run.is_dense


def has_mask(layer: nn.Module) -> bool:
    """Return whether the zeros of a layer's weight are its mask, as they are except in a method's dense phase."""
    return is_pruned(layer) or not isinstance(layer, SparseModule)


def out_in(layer: nn.Module, weight: Tensor) -> Tensor:
    """Return a stored weight as `[out, in]`, or the other way round."""
    return weight if input_dim_of(layer) == -1 else weight.t()


def masked_linear(x: Tensor, a: Tensor, b: Tensor, scaling: float, layer: nn.Module) -> Tensor:
    """Return X D^T `[..., out]`, where D = M * (s B A) is computed in fp32 or fp64, then rounded to the dtype of x.
    The base layer has the mask, and receives no gradient."""
    reject_transforms()
    return _MaskedLinearFunction.apply(x, a, b, scaling, layer)


class _MaskedLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a, b, scaling, layer):
        ctx.save_for_backward(x, a, b)
        ctx.scaling, ctx.layer = scaling, layer
        tokens = x.reshape(-1, x.shape[-1])
        weight = weight_of(layer, x.dtype)
        output = x.new_empty(len(tokens), len(weight))
        with torch.autocast(x.device.type, enabled=False):  # it has chosen the dtype of x, and would round A and B too
            for rows in _blocks(weight):
                output[:, rows] = tokens @ masked_delta(weight, a, b, scaling, rows).to(x.dtype).t()
        return output.reshape(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        x, a, b = ctx.saved_tensors
        tokens, grad = x.reshape(-1, x.shape[-1]), grad_output.reshape(-1, grad_output.shape[-1])
        weight = weight_of(ctx.layer, x.dtype)
        needs_x, *needs_ab = ctx.needs_input_grad[:3]
        dtype = _wide(a)
        grad_x = torch.zeros_like(tokens)
        grad_a, grad_b = torch.zeros_like(a, dtype=dtype), torch.empty_like(b, dtype=dtype)
        with torch.autocast(x.device.type, enabled=False):
            for rows in _blocks(weight):
                if needs_x:
                    grad_x.addmm_(grad[:, rows], masked_delta(weight, a, b, ctx.scaling, rows).to(x.dtype))
                if any(needs_ab):
                    outer = (grad[:, rows].t() @ tokens).to(dtype).masked_fill_(weight[rows] == 0, 0)
                    grad_a.addmm_(b[rows].to(dtype).t(), outer, alpha=ctx.scaling)
                    grad_b[rows] = (outer @ a.to(dtype).t()).mul_(ctx.scaling)
        return grad_x.reshape(x.shape), grad_a.to(a.dtype), grad_b.to(b.dtype), None, None


def masked_delta(weight: Tensor, a: Tensor, b: Tensor, scaling: float, rows: slice = ALL) -> Tensor:
    """Return rows of D, in fp32 or fp64."""
    delta = (b[rows].to(_wide(b)) * scaling) @ a.to(_wide(a))
    return delta.masked_fill_(weight[rows] == 0, 0)


def _blocks(weight: Tensor) -> Iterator[slice]:
    """Yield blocks of output rows of at most `CHUNK` elements, or of one row."""
    out, inputs = weight.shape
    step = max(1, CHUNK // max(inputs, 1))
    for start in range(0, out, step):
        yield slice(start, start + step)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
