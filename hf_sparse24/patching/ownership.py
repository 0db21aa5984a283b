"""Which Transformers models say in their configs that they are sparse: the patched one, and those around it.

A part that was patched alone, such as `model.model`, does not know of the whole, which is what gets saved. So `adopt`
runs whenever the whole passes through the library: in `patch_model`, a controller, an export.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from sparse24_kernels import Pattern
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..config import SavedConfig
from ..extensions import adapters_in, extensions
from ..packed_format import PackedFormat
from ..run import SparseRun, sparse_run
from ..weights.sparse_weight import SparseWeight, sparse_weights
from ..weights.storage import PACKED, TRAINED, layer_name, name_without_adapters
from .targets import find_candidates, find_places

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
        other = cast(SparseRun, weight.run)
        is_unused = not other.owners and other.controller is None
        if other is not run and not (is_unused and (other.config, other.phase) == (run.config, run.phase)):
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
    model.__dict__[LAYERS] = trained_patterns(model)
    for module in model.modules():
        found = module.__dict__.get("config")  # not one that a wrapper passes on
        of_part = type(found) is type(shared) and getattr(found, "quantization_config", None) is run.saved
        if found is shared or of_part:
            module.config = own


def forget_quantizer(model: PreTrainedModel) -> None:
    """Remove Transformers' marks of a quantized model, which refuses `.float()`, `.half()` and training."""
    for name in {"hf_quantizer", "quantization_method", "half", "float"} & set(model.__dict__):
        delattr(model, name)
    model.is_quantized = False  # type: ignore[assignment]  # a bool that Module's types do not know
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and hasattr(module.config, "_is_quantized"):
            del module.config._is_quantized


def trained_patterns(owner: nn.Module) -> dict[str, Pattern]:
    """The pattern of each weight of a model that a method trains, by its name."""
    return {name: weight.pattern for name, weight in sparse_weights(owner, TRAINED).items()}


def name_layers(owner: nn.Module, run: SparseRun) -> None:
    """Name the layers that are sparse in the owner's config, or remove the config's entry if none are."""
    # Without the names that adapters around the layers give: they will not be there when the config is read.
    names = {name_without_adapters(layer_name(name)): pattern for name, pattern in trained_patterns(owner).items()}
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


def match_config(model: nn.Module) -> None:
    """Let the configs in a model name the layers that are sparse or packed now, where that has changed since they were
    written. ValueError: a config cannot say what the model is, as its architecture has other layers."""
    adopt(model)  # where a part was patched by itself, or a layer is a copy of another one
    for owner in outermost(model):
        saved = getattr(owner.config, "quantization_config", None)
        if isinstance(saved, SavedConfig) and not adapters_in(owner):  # with adapters, these alone are saved
            _match(owner, saved)


def _match(owner: Any, saved: SavedConfig) -> None:
    packed, run = saved.facts.packed, sparse_run(owner)
    now = trained_patterns(owner) if packed is None else packed_patterns(owner)
    written = owner.__dict__.get(LAYERS) if packed is None else packed.weights
    if now == written and (run is None or run.saved is saved):
        return
    made = _as_loaded(owner)
    _reject(_layers(owner) ^ _layers(made))
    if not now:
        name_layers(owner, SparseRun(saved))
        forget_quantizer(owner)
    elif packed is not None and run is None:
        saved.facts = replace(saved.facts, packed=replace(packed, weights=now))
    elif run is not None:
        owner.config.quantization_config = run.saved  # all that is sparse may be of another model
        run.owners.add(owner)
        name_layers(owner, run)
        said = dict.fromkeys(run.config.target_modules, run.config.pattern) | (run.config.layer_patterns or {})
        found = find_candidates(made, run) if packed is None else []  # what is packed is read by name alone
        picked = {each.name: str(each.pattern or run.method.pattern) for each in found if each.skipped is None}
        _reject({name for name, _ in picked.items() ^ said.items()} if found else set())
        owner.__dict__[LAYERS] = now


def _layers(model: nn.Module) -> set[str]:
    """The names in files of linear layers and of stacks of experts' weights, packed ones included."""
    return {name_without_adapters(name) for name in find_places(model)} | {*map(layer_name, packed_patterns(model))}


def _as_loaded(owner: Any) -> nn.Module:
    """The model as `from_pretrained` makes it of its config, without weights; itself where its class needs more."""
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            return type(owner)(copy.deepcopy(owner.config))
    except Exception:  # whatever a constructor of foreign code raises
        return owner


def _reject(differing: set[str]) -> None:
    if differing:
        way = "change model.config to what the model is, such as num_hidden_layers; or keep model.state_dict()"
        raise ValueError(f"{min(differing)}: modules were replaced or removed, and config.json tells others: {way}")


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
