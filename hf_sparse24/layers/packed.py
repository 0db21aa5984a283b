"""Packed weights: 2:4 weights without their zeros, in 9/16 of the bytes in bf16, for inference and under adapters.

A packed weight is two buffers of its module, `packed_weight_values` and `packed_weight_indices` (see
`sparse24_kernels.Packed`), in the place of the Parameter `weight`, which is a property now: it unpacks a dense copy at
every read. Where values are int8, a third buffer has the scales. So a packed layer computes, lets gradients through to
its input, and does not train.
`hf_sparse24.patching.packing` packs and unpacks models.
"""

from typing import Any, cast

import sparse24_kernels as kernels
import torch
from sparse24_kernels import Packed
from sparse24_kernels.gemm.packed import unsupported_device
from sparse24_kernels.matmul import packed_layer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from ..weights.packed_weight import PackedWeight, buffer_names
from .made_classes import Made, made_class
from .sparse_module import NO_REPLICAS, reject_other_graphs


class _PackedLinearFunction(torch.autograd.Function):
    """`x W^T + b` with gradients for x and b. The weight is unpacked again for the backward pass, not kept."""

    @staticmethod
    def forward(ctx, x, bias, input_dim, *packed):
        ctx.save_for_backward(*packed)
        output = _packed_linear(x, Packed(*packed), bias, input_dim)
        # Autograd refuses to change a view from in here in place, as adapters do; this is the same memory, no view.
        return torch.ops.aten._unsafe_view(output, output.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_x = grad @ kernels.unpack_nm(Packed(*ctx.saved_tensors)) if ctx.needs_input_grad[0] else None
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        return grad_x, grad_bias, *[None] * 4


def _packed_linear(x: Tensor, packed: Packed, bias: Tensor | None, input_dim: int) -> Tensor:
    if input_dim == -2 and x.device.type == "cpu" and unsupported_device(x.device, x.dtype):
        # How a weight lies in memory decides in which order dense math on a CPU sums: as Conv1D's, for the same bits.
        return nn.functional.linear(x, kernels.unpack_nm(packed).t().contiguous().t(), bias)
    return packed_layer(x, packed, bias)


def pack_weight(module: nn.Module, name: str, input_dim: int, packed: Packed) -> None:
    """Put `packed`, the form of a weight `[..., out, in]`, in place of the Parameter `name`."""
    module.__dict__.setdefault("dense_class", type(module))
    module.__dict__.setdefault("packed24", {})[name] = PackedWeight(module, name, input_dim)
    del module._parameters[name]
    for key, tensor in zip(buffer_names(name), packed):
        if tensor is not None:
            module.register_buffer(key, tensor)
    _choose_class(module)


def unpack_weight(weight: PackedWeight) -> None:
    """Undo `pack_weight`: the Parameter is the dense weight, with its zeros."""
    module, dense = weight.module, nn.Parameter(weight.dense().contiguous())
    for key in weight.buffer_names:
        del module._buffers[key]
    del module.__dict__["packed24"][weight.name]
    _choose_class(module)
    others = dict(module._parameters)
    module._parameters.clear()
    module._parameters.update({weight.name: dense} | others)  # in the order in which optimizers count


class PackedModule(nn.Module):
    """What modules with packed weights share: `packed24`, a `PackedWeight` by the name of each, and `dense_class`."""

    packed24: dict[str, PackedWeight]
    dense_class: type[nn.Module]

    def __init__(self, *args: Any, **kwargs: Any):
        raise TypeError(f"{type(self).__name__} is made from a dense module: use pack_model")

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name in self.__dict__.get("packed24", {}):
            raise ValueError(f"{name} is packed, and cannot be replaced or quantized: call unpack_model(model) first")
        super().register_parameter(name, param)

    def _replicate_for_data_parallel(self):
        raise RuntimeError(NO_REPLICAS)


class PackedLayer(PackedModule):
    """What `PackedLinear` and `PackedConv1D` share."""

    @property
    def weight(self) -> Tensor:
        """The dense weight, with its zeros: a fresh copy at every read. Writes to it are lost."""
        dense = self.packed24["weight"].dense()
        dense._is_hf_initialized = True  # type: ignore[attr-defined]  # so Transformers, loading, does not initialise it
        return dense

    def forward(self, x: Tensor) -> Tensor:
        reject_other_graphs()
        weight, bias = self.packed24["weight"], cast(Tensor | None, self.bias)
        packed = weight.packed
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, packed = x.to(dtype), packed.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        if torch.is_grad_enabled():
            return _PackedLinearFunction.apply(x, bias, weight.input_dim, *packed)
        return _packed_linear(x, packed, bias, weight.input_dim)

    def extra_repr(self) -> str:
        packed = self.packed24["weight"].packed
        out, half = packed.values.shape
        text = f"in={2 * half}, out={out}, bias={self.bias is not None}, dtype={packed.dtype}"
        return text if packed.scales is None else f"{text}, int8 values"


class PackedLinear(PackedLayer, nn.Linear):  # type: ignore[override]  # its weight is computed
    """`nn.Linear` with a packed 2:4 weight, for inference and under adapters. `pack_model` makes it.

    The weight lies in two buffers, `packed_weight_values` `[out, in / 2]` in the model's dtype and
    `packed_weight_indices` uint8 `[out, in / 8]`; where values are int8, `packed_weight_scales` `[out, ceil(in / 128)]`
    has the model's dtype. Gradients reach the input, not the weight.

    Attributes:
        weight: the dense `[out, in]` weight with its zeros, a fresh copy at every read; writes to it are lost.
        bias: as in the dense layer: `[out]`, or None.
    """


class PackedConv1D(PackedLayer, Conv1D):  # type: ignore[misc]  # as above
    """GPT-2's `Conv1D` with a packed 2:4 weight, for inference and under adapters. `pack_model` makes it.

    The buffers are those of `PackedLinear`: `packed_weight_values` `[out, in / 2]`, `packed_weight_indices` uint8
    `[out, in / 8]`, and `packed_weight_scales` where values are int8.

    Attributes:
        weight: the dense `[in, out]` weight with its zeros, a fresh copy at every read; writes to it are lost.
        bias: `[out]`, as in the dense layer.
    """

    __repr__ = nn.Module.__repr__  # Conv1D's own says "Conv1D"


class PackedExperts(Made, PackedModule):
    """Stacked experts with packed weights: a subclass of their own class (see `experts.py`), with the same forward.

    All experts of the module are unpacked while its forward runs, and dropped after.
    """

    prefix = "Packed"
    unpacked: list[dict[str, Tensor]]

    @classmethod
    def members(cls, key: tuple[str, ...]) -> dict[str, Any]:
        return {name: _weight_property(name) for name in key}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        reject_other_graphs()
        self.unpacked.append({name: weight.dense() for name, weight in self.packed24.items()})
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.unpacked.pop()

    def extra_repr(self) -> str:
        shapes = {name: tuple(weight.packed.values.shape) for name, weight in self.packed24.items()}
        lines = [f"{name}: experts={n}, in={2 * half}, out={out}" for name, (n, out, half) in shapes.items()]
        return "\n".join(line for line in (super().extra_repr(), *lines) if line)


def _weight_property(name: str) -> property:
    def read(module: nn.Module) -> Tensor:
        running = module.__dict__["unpacked"]
        return running[-1][name] if running else module.__dict__["packed24"][name].dense()

    return property(read)


def _choose_class(module: nn.Module) -> None:
    """Give a module the class that goes with its packed weights, or its own again."""
    dense_class, packed = module.__dict__["dense_class"], module.__dict__["packed24"]
    if not packed:
        module.__class__ = dense_class
        for key in {"packed24", "dense_class", "unpacked"} & set(module.__dict__):
            del module.__dict__[key]
    elif issubclass(dense_class, nn.Linear | Conv1D):
        module.__class__ = PackedConv1D if issubclass(dense_class, Conv1D) else PackedLinear
    else:
        module.__dict__.setdefault("unpacked", [])
        module.__class__ = made_class(PackedExperts, dense_class, tuple(packed))
