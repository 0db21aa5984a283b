"""Packed weights, for inference and under adapters, and packed masters (`master="packed"`), whose values train."""

from collections import defaultdict
from typing import Any

import sparse24_kernels as kernels
import torch
from sparse24_kernels import Packed
from sparse24_kernels.gemm.packed import unsupported_device
from sparse24_kernels.matmul import packed_layer
from sparse24_kernels.packing import gather_nm
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from ..packed_format import buffer_names
from ..run import SparseRun
from ..weights.gemms import PRUNED
from ..weights.rules import encode
from ..weights.sparse_weight import SparseWeight
from ..weights.storage import PackedFrozen, PackedMaster, WeightView
from .experts import PackedExperts
from .sparse_module import PackedModule, choose_class, reject_tracing, restore_class

# Of the dense gradient that a packed master makes at a time. On a CPU it stays in the cache until its values are taken;
# on a GPU each block waits for the device, so that few large ones are better.
BLOCK_BYTES = defaultdict(lambda: 256 << 20, cpu=4 << 20)
ROWS = 32  # it has a multiple of these


class _PackedLinearFunction(torch.autograd.Function):
    """`x W^T + b` with gradients for x, b and a packed master's values. `method` is None of a frozen weight."""

    @staticmethod
    def forward(ctx, x, values, mask, scales, m, bias, input_dim, dtype, method):
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, values, mask, scales)
        ctx.m, ctx.dtype, ctx.method = m, dtype, method
        output = _multiply(x, Packed(values, mask, scales, m).to(dtype), bias, input_dim)
        # Autograd refuses to change a view from in here in place, as adapters do; this is the same memory, no view.
        return torch.ops.aten._unsafe_view(output, output.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, values, mask, scales = ctx.saved_tensors
        packed = Packed(values, mask, scales, ctx.m)
        grad_x = grad_values = grad_bias = None
        rows = grad.reshape(-1, grad.shape[-1])  # [T, out]
        if ctx.needs_input_grad[0]:
            grad_x = grad @ _grad_input_weight(packed, ctx.dtype, ctx.method)
        if ctx.needs_input_grad[1]:
            grad_values = _grad_values(rows, x.reshape(-1, x.shape[-1]), packed)
        if ctx.needs_input_grad[5]:
            grad_bias = rows.sum(0)
        return grad_x, grad_values, None, None, None, grad_bias, None, None, None


def _grad_input_weight(packed: Packed, dtype: torch.dtype, method: Any) -> Tensor:
    """The weight `[out, in]` of dX = dZ W: the packed one, or what the method makes of it in the master's precision."""
    if method is None or method.gemms.grad_input.weight == PRUNED:
        return kernels.unpack_nm(packed.to(dtype))
    view = WeightView(kernels.unpack_nm(packed), 1, {})
    return encode(method.prune_grad_input(view), view, method.pattern, dtype)[0]


def _grad_values(grad: Tensor, x: Tensor, packed: Packed) -> Tensor:
    """dW = dZ^T X at the kept places, `BLOCK_BYTES` of the dense gradient at a time."""
    out, inputs = grad.shape[1], x.shape[1]
    values = torch.empty_like(packed.values)
    step = max(ROWS, BLOCK_BYTES[x.device.type] // (inputs * x.element_size()) // ROWS * ROWS)
    for top in range(0, out, step):
        some = slice(top, top + step)
        values[some] = gather_nm(grad[:, some].t() @ x, packed.mask[some])
    return values


def _multiply(x: Tensor, packed: Packed, bias: Tensor | None, input_dim: int) -> Tensor:
    if input_dim == -2 and x.device.type == "cpu" and unsupported_device(x.device, x.dtype):
        # How a weight lies in memory decides in which order dense math on a CPU sums: as Conv1D's, for the same bits.
        return nn.functional.linear(x, kernels.unpack_nm(packed).t().contiguous().t(), bias)
    return packed_layer(x, packed, bias)


def pack_weight(
    module: nn.Module, name: str, input_dim: int, packed: Packed, run: SparseRun | None = None, trains: bool = True
) -> None:
    """Put `packed` in place of the Parameter `name`, or of its packed form; with a `run`, as a packed master."""
    storage = (PackedFrozen if run is None else PackedMaster)(module, name, input_dim)
    storage.pattern = packed.pattern
    module.__dict__.setdefault("sparse24", {})[name] = weight = SparseWeight(storage, run, packed.pattern)
    values, mask, scales = buffer_names(name)
    for key in (name, values):
        module._parameters.pop(key, None)
    for key, tensor in ((values, packed.values), (mask, packed.mask), (scales, packed.scales)):
        if key == values and run is not None:
            own = packed.values  # a Parameter that an optimizer may have stays the same object
            _put_first(module, key, own if isinstance(own, nn.Parameter) else nn.Parameter(own, requires_grad=trains))
        elif tensor is not None:
            module.register_buffer(key, tensor.detach())
    if run is not None:
        weight.state.names = (mask,)
    choose_class(module, PackedLinear, PackedConv1D, PackedExperts)


@torch.no_grad()
def unpack_weight(weight: SparseWeight) -> None:
    """Undo `pack_weight`: the Parameter is the dense weight, with its zeros."""
    trains = weight.run is None or weight.master.requires_grad
    module, dense = weight.module, nn.Parameter(weight.storage.whole().contiguous(), requires_grad=trains)
    for key in buffer_names(weight.name):
        module._parameters.pop(key, None)
        module._buffers.pop(key, None)
    del module.__dict__["sparse24"][weight.name]
    if module.__dict__["sparse24"]:
        choose_class(module, PackedLinear, PackedConv1D, PackedExperts)
    else:
        restore_class(module)
    _put_first(module, weight.name, dense)


def _put_first(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Let the weight come before the bias, in the order in which optimizers count."""
    others = dict(module._parameters)
    module._parameters.clear()
    module._parameters.update({name: parameter} | others)


class PackedLayer(PackedModule):
    @property
    def weight(self) -> Tensor:
        dense = self.sparse24["weight"].storage.whole()
        dense._is_hf_initialized = True  # type: ignore[attr-defined]  # so Transformers does not initialise it
        return dense

    def forward(self, x: Tensor) -> Tensor:
        reject_tracing()
        weight = self.sparse24["weight"]
        bias: Any = self.bias
        packed = weight.storage.packed
        dtype = packed.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x = x.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        if torch.is_grad_enabled():
            method = None if weight.run is None else weight.method
            return _PackedLinearFunction.apply(x, *packed, bias, weight.input_dim, dtype, method)
        return _multiply(x, packed.to(dtype), bias, weight.input_dim)

    def extra_repr(self) -> str:
        weight = self.sparse24["weight"]
        (out, inputs), packed = weight.sizes, weight.storage.packed
        text = f"in={inputs}, out={out}, bias={self.bias is not None}, dtype={packed.dtype}"
        text = text if weight.run is None else f"{text}, master"
        return text if packed.scales is None else f"{text}, int8 values"


class PackedLinear(PackedLayer, nn.Linear):  # type: ignore[override]  # its weight is computed
    """`nn.Linear` with a packed N:M weight, for inference and under adapters. `pack_model` makes it.

    Two buffers have the weight: `packed_weight_values` `[out, in * N / M]` in the model's dtype and
    `packed_weight_mask` uint8 `[out, in / 8]`. int8 values have `packed_weight_scales` `[out, ceil(in / 128)]` in
    the model's dtype. Gradients reach the input; with `master="packed"` they reach the values too, a Parameter then.

    Attributes:
        weight: the dense `[out, in]` weight with its zeros, a fresh copy at every read; writes to it are lost.
        bias: as in the dense layer: `[out]`, or None.
    """


class PackedConv1D(PackedLayer, Conv1D):  # type: ignore[misc]  # as above
    """GPT-2's `Conv1D` with a packed N:M weight; its buffers are those of `PackedLinear`. `pack_model` makes it.

    Attributes:
        weight: the dense `[in, out]` weight with its zeros, a fresh copy at every read; writes to it are lost.
        bias: `[out]`, as in the dense layer.
    """
