"""Which Transformers models say in their configs that they are sparse: the patched one, and those around it.

A part that was patched alone, such as `model.model`, does not know of the whole, which is what gets saved. So `adopt`
runs whenever the whole passes through the library: in `patch_model`, a controller, an export.
"""

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, cast

from sparse24_kernels import Pattern
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..extensions import extensions
from ..packed_format import PackedFormat
from ..run import SparseRun
from ..weights.sparse_weight import SparseWeight, sparse_weights
from ..weights.storage import PACKED, TRAINED, layer_name, name_without_adapters

LAYERS = "_sparse24_layers"  # the attribute of a model for what its config says: its copies have it too


def adopt(model: nn.Module, weights: Mapping[str, SparseWeight] | None = None) -> SparseRun | None:
    """Let the Transformers models in `model` say in their configs that parts of them are sparse.

    Copies of layers that are within the model, such as those that PEFT's `modules_to_save` trains, join its run.
    Returns the run of all sparse weights, None where there are none. `weights` are those, where they are known.
    """
    weights = sparse_weights(model, TRAINED) if weights is None else weights
    if not weights:
        return None
    wholes = list(outermost(model))
    written = {id(getattr(whole.config, "quantization_config", None)) for whole in wholes}
    # A copied block may come first, whose run no config knows.
    first = max(weights, key=lambda name: id(weights[name].run.saved) in written)
    run = cast(SparseRun, weights[first].run)
    for name, weight in weights.items():
        if weight.run is not run and not _is_unused_copy(weight.run, run):
            way = "call unpatch_model on the parts, then patch_model on the whole model"
            raise ValueError(f"{name} and {first} were patched apart, with two configs; {way}")
    for weight in weights.values():
        weight.run = run
    for whole in wholes:
        named = getattr(whole.config, "quantization_config", None)
        if (named is None or (named is run.saved and whole not in run.owners)) and sparse_weights(whole, TRAINED):
            write_config(whole, run)
            is_part = any(owner is not whole and whole in owner.modules() for owner in run.owners)
            # Several share one config, which cannot name the layers of each. A copy has its names already.
            if named is None and len(wholes) == 1 and not is_part:
                name_layers(whole, run)
    return run


def _is_unused_copy(other: Any, run: SparseRun) -> bool:
    is_equal = other.config == run.config and other.phase == run.phase
    return is_equal and not other.owners and other.controller is None


def write_config(model: nn.Module, run: SparseRun) -> None:
    """Write into a copy of a model's config of Transformers that it is sparse: other models may share the config."""
    shared: Any = getattr(model, "config", None)
    if not isinstance(shared, PreTrainedConfig):
        return
    run.owners.add(model)
    if isinstance(model, PreTrainedModel):
        for name, function in extensions.model_methods.items():
            setattr(model, name, partial(function, model))  # unlike a bound method, it can be copied and pickled
        model.add_model_tags("hf_sparse24")  # for the cards that Transformers, TRL and PEFT write
    if getattr(shared, "quantization_config", None) is run.saved:
        return
    own: Any = copy.deepcopy(shared)
    own.quantization_config = run.saved
    model.__dict__[LAYERS] = sparse_layers(model)
    for module in model.modules():
        found = module.__dict__.get("config")  # not one that a wrapper passes on
        of_part = type(found) is type(shared) and getattr(found, "quantization_config", None) is run.saved
        if found is shared or of_part:
            module.config = own


def forget_quantizer(model: PreTrainedModel) -> None:
    """Remove Transformers' marks of a quantized model, which refuses `.float()`, `.half()` and training."""
    for name in {"hf_quantizer", "quantization_method"} & set(model.__dict__):
        delattr(model, name)
    model.is_quantized = False  # type: ignore[assignment]  # a bool that Module's types do not know
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and hasattr(module.config, "_is_quantized"):
            del module.config._is_quantized


def sparse_layers(owner: nn.Module) -> dict[str, Pattern]:
    """The patterns of the layers of a model that a method trains, by the names that they have without adapters."""
    weights = sparse_weights(owner, TRAINED)
    return {name_without_adapters(layer_name(name)): weight.pattern for name, weight in weights.items()}


def name_layers(owner: nn.Module, run: SparseRun) -> None:
    """Name the layers that are sparse in the owner's config, or remove the config's entry if none are."""
    # Without the names that adapters around the layers give: they will not be there when the config is read.
    names = sparse_layers(owner)
    list_masters(owner, run)
    if not names:
        if run.facts.packed is not None:
            owner.__dict__.pop("_weight_conversions", None)  # saved as its architecture is, from now on
        for name in extensions.model_methods:
            owner.__dict__.pop(name, None)
        if isinstance(owner, PreTrainedModel):
            owner.model_tags = [tag for tag in owner.model_tags or [] if tag != "hf_sparse24"] or None
    owner_config: Any = owner.config
    if getattr(owner_config, "quantization_config", None) is not run.saved:  # it has got another one since
        return
    if names:
        own = {name: str(pattern) for name, pattern in names.items() if pattern != run.method.pattern} or None
        run.change_config(target_modules=[*names], exclude_modules=None, layers_to_transform=None, layer_patterns=own)
    else:
        del owner_config.quantization_config


def name_parts(config: PreTrainedConfig, whole: str | None) -> None:
    """Let the configs of a sparse model's parts name the `whole`, while `config.json` is written; None removes that.
    From the files of the whole, Transformers loads CLIP's vision model by the config of that part alone."""
    for part in filter(None, (getattr(config, name, None) for name in config.sub_configs)):
        part.__dict__.pop("quantization_config", None)
        if whole is not None:
            part.quantization_config = {"quant_method": "sparse24", "part_of": whole}


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, DataParallel, DeepSpeed and torch.compile; ValueError where FSDP1 wraps a part."""
    if any(cls.__name__ == "FullyShardedDataParallel" for module in model.modules() for cls in type(module).__mro__):
        way = "use FSDP2, by fully_shard(model) or `fsdp_version: 2` in accelerate's config file"
        raise ValueError(f"FSDP1 (FullyShardedDataParallel) flattens the model's weights: {way}")
    while True:
        kind = {cls.__name__ for cls in type(model).__mro__}
        if "OptimizedModule" in kind:
            model = model._orig_mod  # type: ignore[assignment]  # attributes of a Module are Tensor | Module
        elif kind & {"DistributedDataParallel", "DataParallel", "DeepSpeedEngine"}:
            model = model.module  # type: ignore[assignment]  # as above
        else:
            return model


def outermost(module: nn.Module) -> Iterator[PreTrainedModel]:
    """Yield the Transformers models in `module` that are in no other one."""
    if isinstance(module, PreTrainedModel):
        yield module
    else:
        for child in module.children():
            yield from outermost(child)


def check_not_offloaded(model: nn.Module) -> None:
    """Raise ValueError where weights are on a disk, or wait on a CPU, until their layer runs (`device_map`)."""
    if any(hasattr(module, "_hf_hook") for module in model.modules()) and any(p.is_meta for p in model.parameters()):
        raise ValueError("parts of the model are offloaded to a disk or a CPU; load it without device_map for that")


def packed_patterns(owner: Any) -> dict[str, Pattern]:
    """The pattern of each packed weight of a model, by its name in files, where names are those without adapters."""
    weights = sparse_weights(owner, PACKED)
    return {name.replace(".base_layer.", "."): weight.storage.pattern for name, weight in weights.items()}


def list_masters(owner: Any, run: SparseRun) -> None:
    """Let the config of a model whose packed values train list them, as the files of `save_pretrained` need it."""
    if any(weight.run is not None for weight in sparse_weights(owner, PACKED).values()):
        run.record(packed=PackedFormat(packed_patterns(owner)))
        owner._weight_conversions = []  # in files, all tensors have the names of the model's own `state_dict`
