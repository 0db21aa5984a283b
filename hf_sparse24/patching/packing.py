"""pack_model and unpack_model: inference from packed weights, without the dense master weights."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer

from ..config import SavedConfig
from ..extensions import check_unmerged
from ..layers.packed import pack_weight, unpack_weight
from ..layers.sparse_module import make_dense
from ..packed_format import PackedFormat, check_values
from ..progress import get_logger
from ..run import SparseRun, sparse_run
from ..weights.packed_weight import not_packable, packed_form
from ..weights.sparse_weight import SparseWeight, sparse_weights
from ..weights.storage import PACKED, TRAINED, layer_name
from .masters import packed_config
from .ownership import check_not_offloaded, forget_quantizer, outermost, packed_patterns
from .refusals import reject_non_finite
from .surgery import release, unpatch_model

logger = get_logger(__name__)


@torch.no_grad()
def pack_model(model: nn.Module, values: str = "float") -> int:
    """Compute with packed sparse weights from now on, and give up the dense master weights.

    In place. The model generates, trains adapters, is saved and moved, and does not train by itself. `unpack_model`
    makes it an ordinary model of its sparse weights. A sparse layer that has no packed form becomes dense, and a
    warning names it: M must divide 64, and the input size be a multiple of M and of 8.

    Args:
        model: a patched model in its sparse phase, in the dtype that it will compute in.
        values: `"float"`, exactly those of the sparse weights, or `"int8"`: rounded, with a scale for each row and 128
            weights (5/16 of the bytes in bf16 at 2:4 and 16:32).

    Returns:
        Bytes of memory freed.

    Raises:
        ValueError: the model is not patched, in its dense phase, or a part of a larger one, has merged adapters, NaN
            or inf, or nothing that can be packed; or other `values`.

    Examples:
        >>> from transformers import AutoModelForCausalLM
        >>> model = AutoModelForCausalLM.from_pretrained("gpt2")
        >>> _ = patch_model(model, Sparse24Config(method="fixed-mask"))
        >>> freed = pack_model(model)
        >>> type(model.transformer.h[0].mlp.c_fc).__name__
        'PackedConv1D'
    """
    check_values(values)
    run = check_packable(model, "pack_model", "become dense, with their zeros")
    check_unmerged(model)
    whole = next((owner for owner in run.owners if owner is not model and model in owner.modules()), None)
    if whole is not None:
        raise ValueError(f"the model is a part of {type(whole).__name__}, which is packed as a whole: pack that one")
    before = _bytes(model)
    weights = sparse_weights(model, TRAINED)
    reject_non_finite((name, weight.master) for name, weight in weights.items())
    names = {id(weight): name for name, weight in weights.items()}

    def convert(group: list[SparseWeight]) -> None:
        # All first, then written, as the weights may share a Parameter.
        forms = {id(weight.master): packed_form(names[id(weight)], weight, values) for weight in group}
        chosen = [(weight, forms[id(weight.master)]) for weight in group]
        results = [weight.merged() if form is None else None for weight, form in chosen]
        for (weight, _), result in zip(chosen, results):
            if weight.storage.has_zeros:
                make_dense(weight, result)
        for weight, form in chosen:
            if form is not None:
                pack_weight(weight.module, weight.name, weight.input_dim, form)

    release(model, weights, convert)
    for inner in outermost(model):
        mark_packed(inner, packed_config(run.saved, PackedFormat(packed_patterns(inner), values)))
    return before - _bytes(model)


@torch.no_grad()
def unpack_model(model: nn.Module) -> nn.Module:
    """Turn a packed model into an ordinary one, in place: dense weights with zeros, ready for `patch_model`.

    Args:
        model: a packed model, of `pack_model`, or loaded from a packed export.

    Returns:
        The same model.

    Raises:
        ValueError: the model is not packed, has an adapter that is merged, or is offloaded by its `device_map`.
    """
    weights = sparse_weights(model, PACKED)
    if any(weight.run is not None for weight in weights.values()):
        return unpatch_model(model)
    if not weights:
        raise ValueError("the model is not packed; there is nothing to undo")
    check_unmerged(model)
    check_not_offloaded(model)
    for weight in weights.values():
        unpack_weight(weight)
    for inner in outermost(model):
        forget_quantizer(inner)
        inner.__dict__.pop("_weight_conversions", None)  # saved as its architecture is, from now on
        if hasattr(inner.config, "quantization_config"):
            del inner.config.quantization_config
    return model


def check_packable(
    model: nn.Module, what: str = "format='packed'", rest: str = "are stored dense, with their zeros"
) -> SparseRun:
    """The run of a model that can be packed by `what`; ValueError of any other. Logs which layers cannot be."""
    run = sparse_run(model)
    if run is None:
        raise ValueError("the model is not patched; call patch_model(model) first")
    if run.is_dense:
        raise ValueError("the model is in its dense phase: it computes with dense weights, which have no packed form")
    check_packed_forms(sparse_weights(model, TRAINED), what, rest)
    return run


def check_packed_forms(weights: Mapping[str, SparseWeight], what: str, rest: str) -> None:
    """Raise ValueError where no weight has the packed form that `what` needs. Logs those without one, which `rest`."""
    reasons = {name: reason for name, weight in weights.items() if (reason := not_packable(weight))}
    named = [f"{layer_name(name)} ({reason})" for name, reason in reasons.items()]
    if len(named) == len(weights):
        raise ValueError(f"{what}: no sparse weight has a packed form, such as {named[0]}")
    if named:
        some = ", ".join(named[:3]) + ", ..." * (len(named) > 3)
        logger.warning(f"{what}: {len(named)} of {len(weights)} sparse layers have no packed form and {rest}: {some}")


def mark_packed(model: PreTrainedModel, config: SavedConfig) -> None:
    """Let Transformers know what a packed model is: it then saves it as one, and refuses to train it by itself."""
    model.config.quantization_config = config
    model.hf_quantizer = AutoHfQuantizer.from_config(config, pre_quantized=True)
    model.is_quantized = True  # type: ignore[assignment]  # a bool that Module's types do not know
    model.quantization_method = config.quant_method  # type: ignore[assignment]  # as above
    # Transformers' own refuse a quantized model, which this one need not be: casts are exact or round as ever.
    model.half, model.float = partial(nn.Module.half, model), partial(nn.Module.float, model)  # type: ignore[method-assign]
    # Packed tensors and all others keep the names of the model's own `state_dict` in files.
    model._weight_conversions = []  # type: ignore[assignment]  # a list that Module's types do not know


def _bytes(model: nn.Module) -> int:
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())
