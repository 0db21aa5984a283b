"""Packed weights: 2:4 weights without their zeros, in 9/16 of the bytes in bf16, for inference and under adapters.

A packed weight is two buffers of its module, `packed_weight_values` and `packed_weight_indices` (see
`sparse24_kernels.Packed`), in the place of the Parameter `weight`, which is a property now: it unpacks a dense copy at
every read. So a packed layer computes, lets gradients through to its input, and does not train.
`hf_sparse24.inference` packs and unpacks models.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, cast

import sparse24_kernels as kernels
import torch
from sparse24_kernels import Packed
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True)
class PackedFormat:
    """What `config.json` says of a packed model; docs/packed_format.md has the format.

    Attributes:
        weights: names of the packed weights, as in the dense model's `state_dict`.
        files: sha256 of each file's header by the file's name, empty where nobody wrote them down. A header has the
            name, dtype, shape and place of every tensor, and a number that all files of one export have in common.
        version: of the format.
    """

    weights: tuple[str, ...]
    files: dict[str, str]
    version: int = 1

    LATEST: ClassVar[int] = 1

    @classmethod
    def from_dict(cls, values: Any) -> "PackedFormat":
        """Read what `to_dict` wrote.

        Raises:
            ValueError: with the key, its value and what is allowed.
        """
        if not isinstance(values, dict):
            raise ValueError(f"packed={values!r}: must be a dict")
        version, weights, files = (values.get(key) for key in ("version", "weights", "files"))
        if type(version) is not int or not 1 <= version <= cls.LATEST:
            raise ValueError(f"packed.version={version!r}: this version of hf_sparse24 reads 1 to {cls.LATEST}")
        if not isinstance(weights, list) or not weights or not all(isinstance(name, str) for name in weights):
            raise ValueError("packed.weights must be a non-empty list of names")
        if not isinstance(files, dict) or not all(isinstance(text, str) for text in (*files, *files.values())):
            raise ValueError("packed.files must be a dict from the names of files to the sha256 of their headers")
        return cls(tuple(weights), files, version)

    def to_dict(self) -> dict[str, Any]:
        return {"version": self.version, "weights": list(self.weights), "files": self.files}


class PackedWeight:
    """One packed weight. `attach` makes one; `packed_weights(model)` finds them.

    Attributes:
        module, name: the dense weight is `getattr(module, name)`, unpacked at every read.
        input_dim: which of its dimensions is the input dimension, -1 or -2.
    """

    def __init__(self, module: nn.Module, name: str, input_dim: int):
        self.module, self.name, self.input_dim = module, name, input_dim

    @classmethod
    def attach(cls, module: nn.Module, name: str, input_dim: int, packed: Packed) -> None:
        """Put `packed`, values `[..., out, in / 2]` and indices `[..., out, in / 8]`, in the place of a Parameter."""
        module.__dict__.setdefault("dense_class", type(module))
        module.__dict__.setdefault("packed24", {})[name] = weight = cls(module, name, input_dim)
        del module._parameters[name]
        for key, tensor in zip(weight.buffer_names, packed):
            module.register_buffer(key, tensor)
        _choose_class(module)

    def detach(self) -> None:
        """Undo `attach`: the Parameter is the dense weight, with its zeros."""
        module, dense = self.module, nn.Parameter(self.dense().contiguous())
        for key in self.buffer_names:
            del module._buffers[key]
        del module.__dict__["packed24"][self.name]
        _choose_class(module)
        others = dict(module._parameters)
        module._parameters.clear()
        module._parameters.update({self.name: dense} | others)  # in the order in which optimizers count

    @property
    def buffer_names(self) -> tuple[str, str]:
        return buffer_names(self.name)

    @property
    def packed(self) -> Packed:
        return Packed(*(getattr(self.module, key) for key in self.buffer_names))

    @torch.no_grad()
    def dense(self) -> Tensor:
        """A copy of the weight with its zeros, in the layout that the Parameter had."""
        weight = kernels.unpack_nm(self.packed)
        return weight if self.input_dim == -1 else weight.transpose(-1, -2)

    def wrong(self) -> str | None:
        """What is wrong with the two buffers, where packing cannot have made them."""
        return None if self.packed.values.is_meta else wrong_packed(self.packed)


class _PackedLinearFunction(torch.autograd.Function):
    """`x W^T + b` with gradients for x and b. The weight is unpacked again for the backward pass, not kept."""

    @staticmethod
    def forward(ctx, x, values, indices, bias, input_dim):
        ctx.save_for_backward(values, indices)
        output = _packed_linear(x, Packed(values, indices), bias, input_dim)
        # Autograd refuses to change a view from in here in place, as adapters do; this is the same memory, no view.
        return torch.ops.aten._unsafe_view(output, output.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_x = grad @ kernels.unpack_nm(Packed(*ctx.saved_tensors)) if ctx.needs_input_grad[0] else None
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[3] else None
        return grad_x, None, None, grad_bias, None


def _packed_linear(x: Tensor, packed: Packed, bias: Tensor | None, input_dim: int) -> Tensor:
    if x.device.type == "cpu" and input_dim == -2:
        # How a weight lies in memory decides in which order a CPU sums. This is how Conv1D's lies, for the same bits.
        return nn.functional.linear(x, kernels.unpack_nm(packed).t().contiguous().t(), bias)
    return kernels.packed_linear(x, packed, bias)


class PackedModule(nn.Module):
    """What modules with packed weights share: `packed24`, a `PackedWeight` by the name of each, and `dense_class`."""

    packed24: dict[str, PackedWeight]
    dense_class: type[nn.Module]

    def __init__(self, *args: Any, **kwargs: Any):
        raise TypeError(f"{type(self).__name__} is made from a dense module: use pack_model")


class PackedLayer(PackedModule):
    """What `PackedLinear` and `PackedConv1D` share."""

    @property
    def weight(self) -> Tensor:
        """The dense weight, with its zeros: a fresh copy at every read. Writes to it are lost."""
        dense = self.packed24["weight"].dense()
        dense._is_hf_initialized = True  # type: ignore[attr-defined]  # so Transformers, loading, does not initialise it
        return dense

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.packed24["weight"], cast(Tensor | None, self.bias)
        values, indices = weight.packed
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, values = x.to(dtype), values.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        if torch.is_grad_enabled():
            return _PackedLinearFunction.apply(x, values, indices, bias, weight.input_dim)
        return _packed_linear(x, Packed(values, indices), bias, weight.input_dim)

    def extra_repr(self) -> str:
        values = self.packed24["weight"].packed.values
        return f"in={2 * values.shape[1]}, out={values.shape[0]}, bias={self.bias is not None}, dtype={values.dtype}"


class PackedLinear(PackedLayer, nn.Linear):  # type: ignore[override]  # its weight is computed
    """`nn.Linear` with a packed 2:4 weight, for inference and under adapters. `pack_model` makes it.

    The weight lies in two buffers, `packed_weight_values` `[out, in / 2]` in the model's dtype and
    `packed_weight_indices` uint8 `[out, in / 8]`. Gradients reach the input, not the weight.

    Attributes:
        weight: the dense `[out, in]` weight with its zeros, a fresh copy at every read; writes to it are lost.
        bias: as in the dense layer: `[out]`, or None.
    """


class PackedConv1D(PackedLayer, Conv1D):  # type: ignore[misc]  # as above
    """GPT-2's `Conv1D` with a packed 2:4 weight, for inference and under adapters. `pack_model` makes it.

    The two buffers are those of `PackedLinear`: `packed_weight_values` `[out, in / 2]` and `packed_weight_indices`
    uint8 `[out, in / 8]`.

    Attributes:
        weight: the dense `[in, out]` weight with its zeros, a fresh copy at every read; writes to it are lost.
        bias: `[out]`, as in the dense layer.
    """

    __repr__ = nn.Module.__repr__  # Conv1D's own says "Conv1D"


class PackedExperts(PackedModule):
    """Stacked experts with packed weights: a subclass of their own class (see `experts.py`), with the same forward.

    All experts of the module are unpacked while its forward runs, and given up after.
    """

    unpacked: list[dict[str, Tensor]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.unpacked.append({name: weight.dense() for name, weight in self.packed24.items()})
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.unpacked.pop()

    def extra_repr(self) -> str:
        shapes = {name: tuple(weight.packed.values.shape) for name, weight in self.packed24.items()}
        lines = [f"{name}: experts={n}, in={2 * half}, out={out}" for name, (n, out, half) in shapes.items()]
        return "\n".join(line for line in (super().extra_repr(), *lines) if line)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty_experts, (self.dense_class, tuple(self.packed24)), self.__dict__  # pickle finds no made class


def _empty_experts(dense_class: type, names: tuple[str, ...]) -> nn.Module:
    cls = _experts_class(dense_class, names)
    return cls.__new__(cls)


@cache
def _experts_class(dense_class: type, names: tuple[str, ...]) -> type[PackedExperts]:
    properties = {name: _weight_property(name) for name in names}
    return type(f"Packed{dense_class.__name__}", (PackedExperts, dense_class), properties)


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
        module.__class__ = _experts_class(dense_class, tuple(packed))


def buffer_names(name: str) -> tuple[str, str]:
    """What the values and the indices of a packed weight are called, in its module or, by its whole name, in a file."""
    path, dot, name = name.rpartition(".")
    # Transformers renames or splits what begins like the weights of some architectures, so these begin differently.
    return f"{path}{dot}packed_{name}_values", f"{path}{dot}packed_{name}_indices"


def packed_weight_name(buffer: str) -> str | None:
    """The weight that a tensor in a checkpoint is the values or the indices of, by its name; None of any other."""
    match = re.fullmatch(r"(.*\.)?packed_(.+)_(values|indices)", buffer)
    return None if match is None else f"{match[1] or ''}{match[2]}"


def packed_weights(model: nn.Module) -> dict[str, PackedWeight]:
    """The packed weights of `model` by the dense weight's name, in module order; shared modules count once."""
    return {
        f"{prefix}.{name}" if prefix else name: weight
        for prefix, module in model.named_modules()
        for name, weight in module.__dict__.get("packed24", {}).items()
    }


def pack_exactly(weight: Tensor, input_dim: int) -> Packed | None:
    """A matrix, or a stack of them, in packed form; None where that would lose something."""
    weight = weight if input_dim == -1 else weight.transpose(-1, -2)
    packed = kernels.pack_nm(weight)
    return packed if torch.equal(kernels.unpack_nm(packed), weight) else None


def wrong_packed(packed: Packed) -> str | None:
    """What is wrong with values `[..., out, in / 2]` and indices `[..., out, in / 8]` that were read from a file."""
    values, indices = packed
    fits = (*values.shape[:-1], values.shape[-1] // 4) == tuple(indices.shape) and not values.shape[-1] % 4
    if not (fits and values.is_floating_point() and indices.dtype == torch.uint8):
        return f"values are {values.dtype} {tuple(values.shape)}, indices {indices.dtype} {tuple(indices.shape)}"
    # Within four, the lower element comes first: two of them at one place would overwrite each other.
    if not all(bool(((group & 3) < (group >> 2)).all()) for group in (indices & 15, indices >> 4)):
        return "its indices are not in ascending order"
    ends = torch.stack(torch.aminmax(values)) if values.numel() else values
    return None if bool(ends.isfinite().all()) else "NaN or inf in its values"
