"""How modules with sparse or packed weights are saved, loaded, cast and copied; classes that are made at run time."""

from collections.abc import Hashable
from functools import cache
from typing import Any, ClassVar

import torch
from sparse24_kernels.checks import INPUTS
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..facts import MARKER
from ..weights import sharding
from ..weights.sparse_weight import SparseWeight, wrong_state


class Made:
    """The base of what stands in front of a module's own class. pickle finds no made class by name, so an instance is
    pickled by `made_of`, the arguments of `made_class`."""

    prefix: ClassVar[str]
    made_of: ClassVar[tuple[type, type, Any]]

    @classmethod
    def members(cls, key: Any) -> dict[str, Any]:
        """The attributes of the class for a key."""
        return {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, self.made_of, self.__dict__


@cache
def made_class(front: Any, own: type, key: Hashable) -> Any:
    """The subclass of a module's `own` class with `front` before it; one for each `key`."""
    members = front.members(key) | {"made_of": (front, own, key)}
    return type(f"{front.prefix}{own.__name__}", (front, own), members)


def change_class(module: Any, cls: Any) -> None:
    """Give a module another class, and its forward where accelerate's `device_map` keeps that of the class before."""
    module.__class__ = cls
    if "_old_forward" in vars(module):
        module._old_forward = cls.forward.__get__(module)


def choose_class(module: nn.Module, linear: Any, conv1d: Any, experts: Any) -> None:
    """Give a module with sparse or packed weights the class of this kind that stands for its own."""
    own = module.__dict__.setdefault("dense_class", type(module))
    if issubclass(own, nn.Linear | Conv1D):
        change_class(module, conv1d if issubclass(own, Conv1D) else linear)
    else:
        module.__dict__.setdefault("running", [])
        change_class(module, made_class(experts, own, tuple(module.__dict__["sparse24"])))


def restore_class(module: nn.Module) -> None:
    """Give a module without sparse and packed weights its own class again."""
    if "dense_class" in vars(module):
        change_class(module, vars(module)["dense_class"])
    for key in {"sparse24", "dense_class", "running"} & set(vars(module)):
        del module.__dict__[key]


def _empty(front: Any, own: type, key: Hashable) -> Any:
    cls = made_class(front, own, key)
    return cls.__new__(cls)


@torch.compiler.assume_constant_result  # torch.export's strict mode takes the flag for False
def _makes_onnx() -> bool:
    return torch.onnx.is_in_onnx_export()


def reject_transforms() -> None:
    """Raise RuntimeError within a transform of torch.func: kernels read memory, which its tensors lack."""
    if torch._C._are_functorch_transforms_active():
        way = "unpatch_model(model), unpack_model(model) of a packed one, or merge_and_unload() of PEFT makes it dense"
        raise RuntimeError(f"torch.func (grad, vmap, jvp, jacrev, ...) cannot transform a sparse model: {way}")


def reject_tracing() -> None:
    """Raise RuntimeError where torch.func transforms the forward, or ONNX or TorchScript records it."""
    reject_transforms()
    if torch.jit.is_tracing() or (torch.compiler.is_exporting() and _makes_onnx()):
        way = "from_pretrained(directory) after export_model(model, directory), or unpack_model(model) of a packed one"
        raise RuntimeError(f"ONNX and TorchScript have no 2:4 operators: convert a dense model with zeros, {way}")


@torch.no_grad()
def make_dense(weight: SparseWeight, result: Tensor | None = None) -> None:
    """Make the module of a weight what it was, with `result` written into the Parameter, or the master as it is."""
    module, weights = weight.module, weight.module.__dict__["sparse24"]
    if result is not None:
        weight.parameter.copy_(result)
    weight.state.remove()
    del weights[weight.name]
    if not weights:
        restore_class(module)


class WeightModule(nn.Module):
    """A module that a dense one becomes in place: with its `SparseWeight`s by Parameter name, and its former class."""

    sparse24: dict[str, SparseWeight]
    dense_class: type[nn.Module]
    __repr__ = nn.Module.__repr__  # Conv1D's own says "Conv1D"

    def _replicate_for_data_parallel(self):
        way = "start one process for each GPU (torchrun, accelerate launch), or show it one (CUDA_VISIBLE_DEVICES=0)"
        raise RuntimeError(f"nn.DataParallel runs copies of the model in threads, which share no masks; {way}")


class PackedModule(WeightModule):
    """The base of packed layers and of packed stacked experts."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name in self.__dict__.get("sparse24", {}):
            raise ValueError(f"{name} is packed, and cannot be replaced or quantized: call unpack_model(model) first")
        super().register_parameter(name, param)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        for key in {prefix + name for name in self.sparse24} & state_dict.keys():
            way = "load it after unpack_model(model), then pack again"
            errors.append(f"{key} is packed and takes no dense weight: {way}")

    def _apply(self, fn, recurse=True):
        for packed in (weight.storage.packed for weight in self.sparse24.values()):
            dtype, mask = (fn(torch.empty(0, dtype=dtype, device="cpu")).dtype for dtype in (packed.dtype, torch.uint8))
            if dtype not in INPUTS or mask != torch.uint8:
                way = "model.to() casts to fp16, bf16, fp32 and fp64; for others call unpack_model(model) first"
                raise ValueError(f"packed weights cannot be cast to {dtype}, with masks in {mask}: {way}")
        return super()._apply(fn, recurse)


class SparseModule(WeightModule):
    """The base of sparse layers and of sparse stacked experts. The method's state is in buffers of the module."""

    def __setattr__(self, name, value):
        if type(value).__module__.startswith("torchao.") and name in self.__dict__.get("sparse24", {}):
            way = "call export_model(model, directory), and quantize what from_pretrained makes of that; the zeros stay"
            raise ValueError(f"torchao would quantize {name}, a dense master weight, which nothing prunes then: {way}")
        # FSDP2 gathers by `setattr`: the whole weight, a plain tensor, takes the place of a DTensor.
        before = self.__dict__.get("_parameters", {}).get(name)
        if sharding.is_sharded(before) and not sharding.is_sharded(value) and name in self.__dict__.get("sparse24", {}):
            self.sparse24[name].storage.gathered_from = before
        super().__setattr__(name, value)

    def _apply(self, fn, recurse=True):
        # Casting a model casts its buffers. A scale rounded to bf16 would change what the model computes.
        weights = list(self.sparse24.values())
        before = [dict(weight.state) for weight in weights]
        for weight in weights:
            weight.clear_encodings()
        super()._apply(fn, recurse)
        for weight, state in zip(weights, before):
            for name, tensor in state.items():
                if tensor.is_floating_point() and not tensor.is_meta:
                    weight.set_state({name: tensor.to(weight.state[name].device)})
        return self

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        state_dict.pop(prefix + MARKER, None)  # load_state_dict's own copy
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        for weight in self.sparse24.values():
            key = prefix + weight.name
            names = list(weight.state.in_model(key))
            if any(name in state_dict for name in names):
                weight.state.is_ready = True
                if wrong := wrong_state(weight):
                    errors.append(f"{key}: {wrong}; the checkpoint is damaged, load another one")
                    continue
            elif not weight.state.is_ready and key in state_dict:
                # Dense weights for a model that was patched without any: the rest starts from them.
                missing[:] = [name for name in missing if name not in names]
                weight.init_state(with_parameters=True)
            elif names and key in state_dict and not weight.run.progress[0]:
                # Averaged weights must not choose other masks and scales, and nothing tells them from other weights.
                way = (
                    "right for averaged weights of one run; for any others, such as a dense model's, call init_state()"
                )
                way += " on each of hf_sparse24.sparse_weights(model).values() afterwards"
                weight.run.warn_once(
                    f"dense weights loaded without {list(weight.state)}, which stay as they were: {way}"
                )
            weight.clear_encodings()
