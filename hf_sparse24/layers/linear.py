"""The sparse linear layer, and an explanation of its three GEMMs.

A linear layer Z = X W^T with weight W `[out, in]` and T tokens costs three GEMMs per training step:

    output        Z  = X  W^T       [T, in]  x [in, out]     contracts over in
    grad_input    dX = dZ W         [T, out] x [out, in]     contracts over out
    grad_weight   dW = dZ^T X       [out, T] x [T, in]       contracts over tokens

A sparse tensor core halves the work of a GEMM when one operand has two zeros in every four elements *along the
dimension that is contracted*. Each GEMM contracts a different dimension, so each asks for its own sparsity:

    output        wants W 2:4 along in:       any 2:4 mask
    grad_input    wants W 2:4 along out:      only a mask that is 2:4 in both directions, a transposable one
    grad_weight   wants dZ 2:4 along tokens:  neither operand is a weight; the gradient is pruned at random, unbiased

A method and a config choose the GEMMs as data, `gemms.Gemms`; this file runs them.

`weight`, the Parameter, always stays the dense master: the optimizer updates all of it, and its gradient is that of
the pruned weight, passed straight through. Only where the method says `keeps_zeros` does the mask stop it too.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import torch
from sparse24_kernels.fp8 import fp8_simulate
from sparse24_kernels.gemm import GemmPlan
from sparse24_kernels.gemm.backend import Operand
from sparse24_kernels.matmul import sparse_layer
from sparse24_kernels.prune import mask_gradient
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from ..weights.encodings import Wanted
from ..weights.gemms import MASK, Gemm, Gemms
from .sparse_module import SparseModule, reject_tracing


class _Pass(NamedTuple):
    """How a forward and its backward compute, besides their tensors. `encode` makes the operand of grad_input in
    backward, where FSDP2 frees the weight in between. `turned`: the weight and its mask are stored `[in, out]`."""

    gemms: Gemms
    output_plan: GemmPlan
    input_plan: GemmPlan | None
    backend: str
    encode: Callable[[], list[Tensor]] | None
    turned: bool


class _SparseLinearFunction(torch.autograd.Function):
    """The three GEMMs. `weight` `[out, in]` is there to receive the gradient, where `mask`, if there is one, keeps it;
    it is multiplied by nothing. The operand of grad_input, `input_weight`, is None where x needs no gradient, where it
    is `output_weight`, and where backward makes it."""

    @staticmethod
    def forward(ctx, x, weight, output_weight, input_weight, mask, bias, rng_key, how):
        gemm = how.gemms.output
        x = gemm.prune(x, -1, None)
        kept = output_weight if input_weight is None else input_weight
        ctx.save_for_backward(x, kept if how.encode is None and ctx.needs_input_grad[0] else None, mask, rng_key)
        ctx.how, ctx.weight_dtype = how, weight.dtype
        output = _output(gemm, how.output_plan, x, output_weight, bias)
        # Autograd refuses to change a view from in here in place, as adapters do; this is the same memory, no view.
        return torch.ops.aten._unsafe_view(output, output.shape)

    @staticmethod
    @once_differentiable  # a second derivative would be another function's, and must not pass for this one's
    def backward(ctx, grad_output):
        x, weight, mask, rng_key = ctx.saved_tensors
        how = ctx.how
        grad_x = grad_weight = grad_bias = None
        grad = grad_output.reshape(-1, grad_output.shape[-1])  # [T, out]
        if ctx.needs_input_grad[0]:
            # Other random streams than grad_weight's: for dZ, and after it for the weight.
            key = rng_key + 1 if rng_key is not None and "mvue" in how.gemms.grad_input.estimator else None
            if how.encode is not None:
                (weight,) = how.encode()
            grad_x = _grad_input(how.gemms.grad_input, how.input_plan, grad_output, weight, key)
        if ctx.needs_input_grad[1]:
            x = x.reshape(-1, x.shape[-1])
            grad_weight = _grad_weight(how.gemms.grad_weight, grad, x, rng_key, how.backend).to(ctx.weight_dtype)
            if mask is not None:
                stored = mask_gradient(grad_weight.t() if how.turned else grad_weight, mask)
                grad_weight = stored.t() if how.turned else stored
        if ctx.needs_input_grad[5]:
            grad_bias = grad.sum(0)  # from the whole gradient: it costs no GEMM, so nothing is pruned
        return grad_x, grad_weight, None, None, None, grad_bias, None, None


def _output(gemm: Gemm, plan: GemmPlan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Z = X W^T from a pruned X `[..., in]`."""
    x, weight = _rounded(gemm, "e4m3", x, weight)
    return sparse_layer(x, weight, bias, plan) if plan.is_sparse else nn.functional.linear(x, weight, bias)


def _grad_input(gemm: Gemm, plan: GemmPlan, grad: Tensor, weight: Tensor, key: Tensor | None) -> Tensor:
    """dX = dZ W from `[..., out]`."""
    grad, weight = _rounded(gemm, "e5m2", gemm.prune(grad, -1, key), weight)
    return sparse_layer(grad, weight, None, plan) if plan.is_sparse else grad @ weight


def _grad_weight(gemm: Gemm, grad: Tensor, x: Tensor, key: Tensor | None, backend: str) -> Tensor:
    """dW = dZ^T X from `[T, out]` and `[T, in]`."""
    plan = gemm.plan(len(grad), grad.shape[1], x.shape[1], grad.dtype, grad.device, backend)
    if plan.is_sparse:
        return plan.backend.mm(Operand(gemm.compress(grad, key, plan)), x, plan)
    grad, x = _rounded(gemm, "e5m2", gemm.prune(grad, 0, key), x)
    return grad.t() @ x


def _rounded(gemm: Gemm, format: str, *operands: Tensor) -> tuple[Tensor, ...]:
    if gemm.precision == "native":
        return operands
    return tuple(fp8_simulate(operand, format) for operand in operands)


class Sparse24Layer(SparseModule):
    """The base of `Sparse24Linear` and `Sparse24Conv1D`: the GEMMs with a sparse weight."""

    def sparse_weight(self) -> Tensor:
        """The weight that the GEMMs use while sparse, in the layout of `.weight`: a new tensor without gradients."""
        return self.sparse24["weight"].pruned()

    def forward(self, x: Tensor) -> Tensor:
        sparse = self.sparse24["weight"]
        method = sparse.method
        if sparse.run.is_dense:
            return self.dense_class.forward(self, x)
        reject_tracing()
        dtype, bias = sparse.parameter.dtype, cast(Tensor | None, self.bias)
        if torch.is_autocast_enabled(x.device.type):
            # Pruned from the master's precision, multiplied in autocast's: a mask never depends on rounding.
            dtype = torch.get_autocast_dtype(x.device.type)
            x = x.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        weight, turned = sparse.storage.out_in(sparse.parameter), sparse.input_dim == -2
        run, rng_key, (out, inputs) = sparse.run, sparse.rng_key, weight.shape
        gemms, tokens, backend = method.gemms, x.numel() // inputs, run.backend
        output_plan = gemms.output.plan(tokens, out, inputs, dtype, x.device, backend)
        wanted, input_plan, encode, mask = [gemms.output.wanted(output_plan)], None, None, None
        learns, is_compiling = torch.is_grad_enabled(), torch.compiler.is_compiling()
        if learns and self.training and weight.requires_grad and not is_compiling:
            run.expect_controller()
        # A graph that is traced asks for every gradient, needed or not.
        if learns and (x.requires_grad or is_compiling):
            input_plan = gemms.grad_input.plan(tokens, out, inputs, dtype, x.device, backend)
            if sparse.storage.gathered_from is None or is_compiling:
                wanted.append(gemms.grad_input.wanted(input_plan))
            else:
                encode = partial(sparse.encoded, [gemms.grad_input.wanted(input_plan)], dtype)
        operands = sparse.encoded(list(dict.fromkeys(wanted)), dtype)
        output_weight, input_weight = operands[0], None if wanted[-1] == wanted[0] else operands[-1]
        if method.keeps_zeros and learns and weight.requires_grad:
            (mask,) = sparse.encoded([Wanted(MASK)], dtype)
        how = _Pass(gemms, output_plan, input_plan, backend, encode, turned)
        output = _SparseLinearFunction.apply(x, weight, output_weight, input_weight, mask, bias, rng_key, how)
        return method.adapt_output(x, output, sparse.state.parameters, run.phase)

    def extra_repr(self) -> str:
        sparse = self.sparse24["weight"]
        (out, inputs), method = sparse.sizes, sparse.method.name
        return f"in={inputs}, out={out}, bias={self.bias is not None}, method={method}, phase={sparse.run.phase}"


class Sparse24Linear(Sparse24Layer, nn.Linear):
    """`nn.Linear` whose GEMMs use an N:M sparse weight. `patch_model` makes it, of a layer that is there.

    The optimizer updates the dense master weight; the GEMMs multiply by what the method prunes it to, and the gradient
    of that goes straight through to the master. What the method keeps for it is in buffers.

    Attributes:
        weight: the dense master weight, a Parameter `[out, in]`. `sparse_weight()` is what the GEMMs use.
        bias: as in the dense layer: `[out]`, or None.
    """


class Sparse24Conv1D(Sparse24Layer, Conv1D):
    """GPT-2's `Conv1D` with an N:M sparse weight, sparse along `in`; otherwise like `Sparse24Linear`.

    Attributes:
        weight: the dense master weight, a Parameter `[in, out]`. `sparse_weight()` is what the GEMMs use.
        bias: `[out]`, as in the dense layer.
    """
