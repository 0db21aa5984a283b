"""pack_model and unpack_model: inference from packed weights, without the dense master weights."""

import torch
from sparse24_kernels import Packed
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

from .config import Sparse24Config
from .packed import PackedFormat, PackedWeight, pack_exactly, packed_weights
from .patching import patched_config, unpatch_model
from .weight import SparseWeight, sparse_weights


@torch.no_grad()
def pack_model(model: nn.Module) -> int:
    """Compute with packed sparse weights from now on, and give up the dense master weights.

    In place. Layers become `PackedLinear` or `PackedConv1D`, experts `PackedExperts`: the model generates, trains
    adapters, is saved and moved, and does not train by itself. `unpack_model` makes it an ordinary model of its sparse
    weights; what the master weights had besides is gone. A sparse layer whose input size is no multiple of 8 becomes a
    dense one.

    Args:
        model: a patched model in its sparse phase, in the dtype that it will compute in.

    Returns:
        Bytes of memory freed.

    Raises:
        ValueError: the model is not patched, is in its dense phase, or has weights that are not 2:4.
    """
    config = check_packable(model)
    before = _bytes(model)
    packed: dict[int, Packed | None] = {}
    forms, input_dims = {}, {}
    for name, weight in sparse_weights(model).items():
        if id(weight.parameter) not in packed:  # layers may share one
            packed[id(weight.parameter)] = packed_form(name, weight)
        forms[name], input_dims[name] = packed[id(weight.parameter)], weight.input_dim
    unpatch_model(model)
    for name, form in forms.items():
        if form is not None:
            path, _, attribute = name.rpartition(".")
            PackedWeight.attach(model.get_submodule(path), attribute, input_dims[name], form)
    if isinstance(model, PreTrainedModel):
        mark_packed(model, config.packed_as(PackedFormat(tuple(name for name in forms if forms[name]), {})))
    return before - _bytes(model)


@torch.no_grad()
def unpack_model(model: nn.Module) -> nn.Module:
    """Turn a packed model into an ordinary one, in place: dense weights with zeros, ready for `patch_model`.

    Returns:
        The same model.

    Raises:
        ValueError: the model is not packed.
    """
    weights = packed_weights(model)
    if not weights:
        raise ValueError("the model is not packed; there is nothing to undo")
    for weight in weights.values():
        weight.detach()
    if isinstance(model, PreTrainedModel):
        forget_quantizer(model)
        del model.config.quantization_config
    return model


def check_packable(model: nn.Module) -> Sparse24Config:
    """The config of a model that can be packed.

    Raises:
        ValueError: the model is not patched, or is in its dense phase.
    """
    config = patched_config(model)
    if config is None:
        raise ValueError("the model is not patched; call patch_model(model) first")
    if config.phase == "dense":
        raise ValueError("the model is in its dense phase: what it computes with is not 2:4, so it cannot be packed")
    return config


def packed_form(name: str, weight: SparseWeight) -> Packed | None:
    """What a sparse weight computes with, packed; None where its input size is no multiple of 8.

    Raises:
        ValueError: it is not 2:4.
    """
    if weight.sizes[1] % 8:
        return None
    packed = pack_exactly(weight.method.merged(weight), weight.input_dim)
    if packed is None:
        raise ValueError(
            f"{name} is sparse by a pattern ({weight.method.pattern}) that is not 2:4, which packed weights are: "
            f"export with format='dense'"
        )
    return packed


def mark_packed(model: PreTrainedModel, config: Sparse24Config) -> None:
    """Let Transformers know what a packed model is: it then saves it as one, and refuses to train it by itself."""
    model.config.quantization_config = config
    model.hf_quantizer = AutoHfQuantizer.from_config(config, pre_quantized=True)
    model.is_quantized = True  # type: ignore[assignment]  # a bool that Module's types do not know
    model.quantization_method = config.quant_method  # type: ignore[assignment]  # as above


def forget_quantizer(model: PreTrainedModel) -> None:
    """Take Transformers' marks of a quantized model away, without which .float(), .half() and training are as usual."""
    for name in {"hf_quantizer", "quantization_method"} & set(model.__dict__):
        delattr(model, name)
    model.is_quantized = False  # type: ignore[assignment]  # a bool that Module's types do not know
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and hasattr(module.config, "_is_quantized"):
            del module.config._is_quantized


def _bytes(model: nn.Module) -> int:
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())
