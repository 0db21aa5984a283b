"""What an export writes, in parts that know the names, dtypes and shapes of their tensors, and make them when asked."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from ..patching.packing import is_packable, packed_form
from ..weights.packed_weight import buffer_names
from ..weights.sharding import is_sharded, whole
from ..weights.sparse_weight import SparseWeight


class Part(NamedTuple):
    """Tensors of the checkpoint that are made together.

    Attributes:
        like: by name, in the order of writing, tensors on the meta device of the same dtypes and shapes.
        make: gives the tensors by name.
        weight: the sparse weight that they come from, None for any other tensor.
        packed: the name of that weight where the tensors are its packed form, None where they are dense.
    """

    like: Mapping[str, Tensor]
    make: Callable[[], Mapping[str, Tensor]]
    weight: SparseWeight | None = None
    packed: str | None = None


def packed_parts(model: PreTrainedModel, weights: dict[str, SparseWeight]) -> list[Part]:
    """All tensors of the packed checkpoint, by the names in the model's own `state_dict`."""
    parts = []
    for name, tensor in _saved_tensors(model, weights).items():
        weight = weights.get(name)
        if weight is None or not is_packable(weight):
            parts.append(_plain_part(name, tensor, weight))
        else:
            parts.append(_packed_part(name, weight))
    return parts


def _packed_part(name: str, weight: SparseWeight) -> Part:
    (out, inputs), parameter = weight.sizes, weight.parameter
    stack = parameter.shape[:-2]
    values = torch.empty(*stack, out, inputs // 2, dtype=parameter.dtype, device="meta")
    indices = torch.empty(*stack, out, inputs // 8, dtype=torch.uint8, device="meta")
    like = dict(zip(buffer_names(name), (values, indices)))

    def make() -> dict[str, Tensor]:
        form = packed_form(name, weight)
        assert form is not None  # of this size
        return dict(zip(like, form))

    return Part(like, make, weight, name)


def dense_parts(model: PreTrainedModel, weights: dict[str, SparseWeight]) -> list[Part]:
    """All tensors of the dense checkpoint, by the names and in the layout of the architecture's own checkpoints."""
    plain = {
        name: _plain_part(name, tensor, weights.get(name)) for name, tensor in _saved_tensors(model, weights).items()
    }
    like = {name: part.like[name] for name, part in plain.items()}
    converted = revert_weight_conversion(model, dict(like))
    if all(converted.get(name) is tensor for name, tensor in like.items()):
        return list(plain.values())
    # Most conversions, such as splitting a stack of experts, take one tensor each, and can be made one by one.
    one_by_one = {name: revert_weight_conversion(model, {name: tensor}) for name, tensor in like.items()}
    together = {name: tensor for made in one_by_one.values() for name, tensor in made.items()}
    if _shapes(together) != _shapes(converted):
        return [Part(converted, lambda: revert_weight_conversion(model, _made_by(plain.values())))]
    return [_converted(model, part, made) for part, made in zip(plain.values(), one_by_one.values())]


def _converted(model: PreTrainedModel, part: Part, like: dict[str, Tensor]) -> Part:
    return part._replace(like=like, make=lambda: revert_weight_conversion(model, dict(part.make())))


def _made_by(parts: Iterable[Part]) -> dict[str, Tensor]:
    return {name: tensor for part in parts for name, tensor in part.make().items()}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _plain_part(name: str, tensor: Tensor, weight: SparseWeight | None) -> Part:
    """A tensor as it is, or with the zeros that the model computes with."""
    like = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")}
    if weight is None or weight.run.is_dense:
        return Part(like, lambda: {name: whole(tensor)})
    return Part(like, lambda: {name: weight.merged()}, weight)


def _saved_tensors(model: PreTrainedModel, weights: dict[str, SparseWeight]) -> dict[str, Tensor]:
    """What a dense model like this one saves, by name: no buffers of the method, shared tensors once."""
    state_dict = model.state_dict()
    beside = {name for key, weight in weights.items() for name in weight.beside(key)}
    ignored = {*(model._keys_to_ignore_on_save or ()), *beside}
    others = {name: x for name, x in state_dict.items() if name not in weights and name not in ignored}
    if any(is_sharded(tensor) for tensor in others.values()):  # the library looks at their memory
        kept = _first_of_tied(others, model)
    else:
        kept = remove_tied_weights_from_state_dict(others, model)
    return {name: tensor for name, tensor in state_dict.items() if name in kept or name in weights}


def _first_of_tied(tensors: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """Without the names by which a Parameter comes again."""
    again = dict(model.named_parameters(remove_duplicate=False)).keys() - dict(model.named_parameters()).keys()
    return {name: tensor for name, tensor in tensors.items() if name not in again}
