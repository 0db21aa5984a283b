"""The tensors that an export writes: their names, dtypes and shapes are known at once, their values on request."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import sparse24_kernels as kernels
import torch
from sparse24_kernels import Pattern
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from ..packed_format import buffer_names, packed_weight_name
from ..patching.refusals import reject_non_finite
from ..weights.packed_weight import not_packable, packed_form
from ..weights.sharding import is_sharded, whole
from ..weights.sparse_weight import SparseWeight
from .packed_files import empty_packed

NOT_FINITE = "nothing was exported. Export an earlier checkpoint; or, if numbers overflow in fp16, the model in bf16"


class LazyTensors(NamedTuple):
    """Tensors of a checkpoint that are computed together, when they are written."""

    like: Mapping[str, Tensor]  # meta tensors of the same dtypes and shapes by name, in the order of writing
    compute: Callable[[], Mapping[str, Tensor]]
    groups: tuple[int, Pattern] | None = None  # the dimension (-1 or -2) along which they may be sparse, and how
    packed: tuple[str, Pattern] | None = None  # the weight whose packed form they are


Weights = Mapping[str, SparseWeight]  # those that the model was patched with, by name


def packed_tensors(model: PreTrainedModel, weights: Weights, values: str) -> list[LazyTensors]:
    """All tensors of the packed checkpoint, by the names in the model's own `state_dict`."""
    return [
        _packed(name, weights[name], values)
        if name in weights and not not_packable(weights[name])
        else _dense(name, tensor, weights.get(name))
        for name, tensor in _saved_tensors(model, weights).items()
    ]


def dense_tensors(model: PreTrainedModel, weights: Weights) -> list[LazyTensors]:
    """All tensors of the dense checkpoint, by the names and in the layout of the architecture's own checkpoints."""
    own = [_dense(name, tensor, weights.get(name)) for name, tensor in _saved_tensors(model, weights).items()]
    like = {name: tensor for lazy in own for name, tensor in lazy.like.items()}
    converted = revert_weight_conversion(model, dict(like))
    if all(converted.get(name) is tensor for name, tensor in like.items()):
        return own
    alone = [revert_weight_conversion(model, dict(lazy.like)) for lazy in own]
    together: dict[tuple[str, ...], list[LazyTensors]] = {}  # such as q, k and v, which files hold as one tensor
    for names, lazy in zip(map(tuple, alone), own):
        together.setdefault(names, []).append(lazy)
    found = [_converted(model, parts) for parts in together.values()]
    shapes = {name: tensor.shape for lazy in found for name, tensor in lazy.like.items()}
    return found if shapes == {name: x.shape for name, x in converted.items()} else [_converted(model, own)]


def _converted(model: PreTrainedModel, parts: list[LazyTensors]) -> LazyTensors:
    """Tensors of the model as the tensors of its architecture's files that are made of them."""

    def convert(tensors: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return revert_weight_conversion(model, {name: x for part in tensors for name, x in part.items()})

    groups = {lazy.groups for lazy in parts}
    shared = groups.pop() if len(groups) == 1 else None
    return LazyTensors(convert(lazy.like for lazy in parts), lambda: convert(lazy.compute() for lazy in parts), shared)


def _packed(name: str, weight: SparseWeight, values: str) -> LazyTensors:
    """The values and the mask of a sparse weight, and the scales of int8 values."""
    master = weight.master
    form = empty_packed((*master.shape[:-2], *weight.sizes), master.dtype, values, weight.pattern)
    like = {key: x for key, x in zip(buffer_names(name), form[:3]) if x is not None}

    def compute() -> dict[str, Tensor]:
        form = packed_form(name, weight, "float")
        assert form is not None  # of this size
        reject_non_finite([(name, form.values)], NOT_FINITE)  # a scale above 1 may overflow
        form = kernels.quantize_packed(form) if values == "int8" else form
        return dict(zip(like, (x for x in form[:3] if x is not None)))

    return LazyTensors(like, compute, packed=(name, weight.pattern))


def _dense(name: str, tensor: Tensor, weight: SparseWeight | None) -> LazyTensors:
    """A tensor as it is, or with the zeros that the model computes with."""
    like = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")}
    if weight is None or weight.run.is_dense:
        return LazyTensors(like, lambda: {name: whole(tensor)})

    def compute() -> dict[str, Tensor]:
        merged = weight.merged()
        reject_non_finite([(name, merged)], NOT_FINITE)
        return {name: merged}

    return LazyTensors(like, compute, (weight.input_dim, weight.method.pattern))


def _saved_tensors(model: PreTrainedModel, weights: Weights) -> dict[str, Tensor]:
    """The tensors by name that a dense model of this architecture saves: shared ones once, without a method's state.
    In place of packed weights stand dense tensors on the meta device."""
    state_dict = {}
    for name, tensor in model.state_dict().items():
        master = packed_weight_name(name) or ""
        weight = weights.get(master)
        if weight is None:
            state_dict[name] = tensor
        elif name == buffer_names(master)[0]:
            state_dict[master] = weight.storage.out_in(tensor.new_empty(weight.sizes, device="meta"))
    ignored = {name for key, weight in weights.items() for name in weight.state.in_model(key)}
    ignored |= {*(model._keys_to_ignore_on_save or ())}
    others = {name: x for name, x in state_dict.items() if name not in weights and name not in ignored}
    if any(is_sharded(tensor) for tensor in others.values()):  # the library compares addresses of memory
        again = dict(model.named_parameters(remove_duplicate=False)).keys() - dict(model.named_parameters()).keys()
        kept = others.keys() - again
    else:
        kept = {*remove_tied_weights_from_state_dict(others, model)}
    return {name: tensor for name, tensor in state_dict.items() if name in kept or name in weights}
