"""find_candidates: which layers become sparse, by structure and by usual names, without a table of models."""

import re
from collections.abc import Collection
from typing import Any, NamedTuple, cast

import torch
from sparse24_kernels import Pattern
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from ..layers.sparse_module import PackedModule
from ..module_names import TARGET_GROUPS, ModuleNames, ends_with
from ..run import SparseRun
from ..weights.input_dim import find_input_dim
from ..weights.storage import layer_name, name_without_adapters
from .unsupported import overlapping_tensors, unsupported_reason

# Transformers' names of the sub-configs of towers: `vision_config`, `audio_config`, `audio_encoder` and the like.
_TOWER = re.compile(r"vision|image|video|audio|speech")
# Types of configs of which Transformers has a model that writes text.
_WRITING_TEXT = {
    *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    *modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}

# Usual names of modules, and of their classes, in an attention or a feed-forward sublayer.
_ATTENTION = re.compile(r"attn|attentions?\d*$|^attention", re.IGNORECASE)
_FEED_FORWARD = re.compile(
    r"mlp|ffn|feed_?forward|^ff(_|$)|^fc_?\d|^lin\d|^pwconv|intermediate|^output$|dense_?relu|layerff|experts?$",
    re.IGNORECASE,
)
# Layers that pick experts or tokens: a wrong pick costs more than their few weights save.
_ROUTER = re.compile(r"^(shared_expert_)?gate$|router|indexer", re.IGNORECASE)


class Place(NamedTuple):
    """The position of a linear layer or a stack of experts' weights in the model, and its names."""

    path: list[tuple[str, nn.Module]]  # from the model down to the module with the weight, by their parts of its name
    parameter: str  # the weight's name in that module
    # In this model, and with or without its head (`model.layers.0...`, `layers.0...`); of a stack, the names of its
    # Parameter and of its module.
    names: list[str]
    block: int | None  # the index of its repeated block, None outside any
    sublayer: str | None  # "attention", "mlp" or None
    is_router: bool


class Candidate(NamedTuple):
    """A linear layer or a stack of experts' weights, and why it stays dense."""

    name: str  # of the layer; of a stack, its Parameter's name, `model.layers.0.mlp.experts.gate_up_proj`
    module: nn.Module
    skipped: str | None  # why it stays dense, None if it becomes sparse
    parameter: str = "weight"  # the weight's name in `module`
    note: str | None = None  # how its gradients and its N:M differ from those of other layers, None if they do not
    pattern: Pattern | None = None  # its own N:M, None if it is that of other layers

    @property
    def weight(self) -> Tensor:
        """The Parameter; an empty tensor where the module makes its weight of other tensors, and is skipped."""
        return cast(Tensor, self.module._parameters.get(self.parameter, torch.empty(0, device="meta")))

    @property
    def is_stack(self) -> bool:
        return self.weight.dim() == 3

    @property
    def input_dim(self) -> int:
        """Which of the weight's dimensions is the input dimension, -1 or -2."""
        return cast(int, find_input_dim(self.module, self.parameter))  # without one it is skipped


def find_candidates(model: nn.Module, run: SparseRun) -> list[Candidate]:
    """Return every linear layer and stack of experts' weights of `model` once, in module order."""
    config, places = run.config, find_places(model)
    targets = _picked("target_modules", config.target_modules, places)
    excluded = _picked("exclude_modules", config.exclude_modules, places)
    blocks = _chosen_blocks(config.layers_to_transform, places)
    patterns = _layer_patterns(config, targets, places)
    whole_names = ModuleNames("target_modules", config.target_modules).endings
    towers = _towers(model) if config.target_modules in TARGET_GROUPS else {}
    heads = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = cast(Any, getattr(model, "get_output_embeddings", lambda: None))()

    def rule_against(place: Place) -> str | None:
        module = place.path[-1][1]
        if module is head or id(module._parameters.get(place.parameter)) in heads:
            return "output embedding"
        if place.block is None:
            return "outside the repeated blocks (nn.ModuleList): a head, a pooler or an embedding projection"
        return "router" if place.is_router else None

    def skipped(name: str, place: Place) -> str | None:
        if name not in targets:
            return f"not in target_modules={config.target_modules!r}"
        if name in excluded:
            return f"in exclude_modules={config.exclude_modules!r}"
        if place.block is not None and place.block not in blocks:
            return f"block not in layers_to_transform={config.layers_to_transform!r}"
        if tower := next((towers[id(around)] for _, around in place.path if id(around) in towers), None):
            return f"in {tower}, which does not read text; only names and expressions in target_modules reach it"
        method = run.method_of(patterns.get(name, run.method.pattern))
        return unsupported_reason(place.path, place.parameter, method)

    estimators = [gemm.estimator for gemm in run.method.gemms[1:] if gemm.estimator != "none"]
    found, of_weight = [], dict[int, Pattern]()
    for name, place in places.items():
        # A whole name in target_modules wins over every rule.
        rule = None if any(whole in place.names for whole in whole_names) else rule_against(place)
        pattern, reason = patterns.get(name), rule or skipped(name, place)
        candidate = Candidate(name, place.path[-1][1], reason, place.parameter)
        if reason is None:
            gradients = f"exact gradients, no {estimators[0]}" if candidate.is_stack and estimators else None
            notes = [note for note in (pattern and str(pattern), gradients) if note]
            candidate = candidate._replace(note=", ".join(notes) or None, pattern=pattern)
            own = pattern or run.method.pattern
            if of_weight.setdefault(id(candidate.weight), own) != own:
                raise ValueError(f"{name} shares its weight with a layer that has another pattern: give both the same")
        found.append(candidate)
    return _without_half_shared(model, found)


def find_places(model: nn.Module) -> dict[str, Place]:
    """Return the places of all linear layers and stacks of experts' weights, by the layer's name."""
    places: dict[str, Place] = {}
    for name, module in model.named_modules():
        parameters: list[str] = []
        if isinstance(module, nn.Linear | Conv1D):
            parameters = [] if isinstance(module, PackedModule) else ["weight"]
        elif "expert" in type(module).__name__.lower() or "expert" in name.rpartition(".")[2]:
            parameters = [key for key, x in module._parameters.items() if x is not None and x.dim() == 3]
        for parameter in parameters:
            places[layer_name(f"{name}.{parameter}".removeprefix("."))] = find_place(model, name, parameter)
    return places


def find_place(model: nn.Module, name: str, parameter: str) -> Place:
    """Return the place of the weight `parameter` of the module `name`."""
    path = [("", model)]
    for part in name.split(".") if name else []:
        path.append((part, getattr(path[-1][1], part)))
    block, texts = None, []
    start = next((i for i, (_, module) in enumerate(path[:-1]) if isinstance(module, nn.ModuleList)), None)
    if start is not None:  # the names of the layer and of what is around it up to the ModuleList, and their classes'
        block = int(path[start + 1][0])
        between = [text for part, module in path[start + 1 : -1] for text in (part, type(module).__name__)]
        texts = [path[start][0], *between, path[-1][0]]
    own = [layer_name(f"{name}.{parameter}".removeprefix(".")), name]
    # Below an adapter of PEFT a layer goes by the name that it has without one, too.
    names = dict.fromkeys([*own, *map(name_without_adapters, own)])
    aliases = [alias for own in names for alias in aliases_of(model, own)]
    kinds = {"attention": _ATTENTION, "mlp": _FEED_FORWARD}
    sublayer = next((kind for kind, names in kinds.items() if any(map(names.search, texts))), None)
    return Place(path, parameter, aliases, block, sublayer, any(map(_ROUTER.search, texts)))


def aliases_of(model: nn.Module, name: str) -> list[str]:
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix:
        return [name]
    return [name, name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else f"{prefix}.{name}"]


def _picked(field: str, value: str | list[str] | None, places: dict[str, Place]) -> set[str]:
    """Return the layers that a field of the config names; ValueError where it names none, as a typo does."""
    if value is None:
        return set()
    selector = ModuleNames(field, value)
    picked = {name for name, place in places.items() if selector.picks(place.names, place.sublayer)}
    every_name = [name for place in places.values() for name in place.names]
    unmatched = [end for end in selector.endings if not any(ends_with(name, end) for name in every_name)]
    if places and (unmatched or not picked):
        what = " is part of one" if selector.group else "'s whole name matches (begin with '.*' to match endings)"
        what = f"'s name ends in {unmatched}" if unmatched else what
        endings = sorted({name.rpartition(".")[2] for name in places})
        raise ValueError(
            f"{field}={value!r}: no linear layer{what}; the model has {endings}, such as {next(iter(places))!r}; "
            f"groups are {list(TARGET_GROUPS)}"
        )
    return picked


def _chosen_blocks(layers: int | list[int] | None, places: dict[str, Place]) -> set[int]:
    blocks = {place.block for place in places.values() if place.block is not None}
    if layers is None:
        return blocks
    chosen = set(layers if isinstance(layers, list) else [layers])
    if blocks and not chosen <= blocks:
        raise ValueError(f"layers_to_transform={layers!r}: the blocks with linear layers are {sorted(blocks)}")
    return chosen


def _layer_patterns(config: Any, targets: set[str], places: dict[str, Place]) -> dict[str, Pattern]:
    """Return the N:M of layers that have their own, by name. ValueError: two entries, of which JSON keeps no order."""
    own, chosen_by = config.layer_patterns or {}, dict[str, str]()
    for names, pattern in own.items():
        chosen = _picked("layer_patterns", names, places)
        if places and not chosen & targets:
            where = f"target_modules={config.target_modules!r}"
            raise ValueError(f"layer_patterns={names!r}: none of its layers is in {where}")
        for name in sorted(chosen & targets):
            other = chosen_by.setdefault(name, names)
            if own[other] != pattern:
                both = {other: own[other], names: pattern}
                raise ValueError(f"layer_patterns={both!r}: both pick {name}; give each layer one pattern")
    return {name: Pattern.parse(own[names]) for name, names in chosen_by.items()}


def _towers(model: nn.Module) -> dict[int, str]:
    """Classes of a model's parts that read images or sound, by id, where it writes text: CLIP's towers are equals."""
    kinds: set[type] = set()
    towers, writes_text = {}, False
    for module in model.modules():  # from the outside in
        config = getattr(module, "config", None)
        if not isinstance(config, PreTrainedConfig):
            continue
        if type(config) in kinds:
            towers[id(module)] = type(module).__name__
        parts = {key: getattr(config, key, None) for key in config.sub_configs}
        texts = [config, *(part for key, part in parts.items() if not _TOWER.search(key))]
        writes_text |= config.model_type in _WRITING_TEXT or config.model_type not in CONFIG_MAPPING_NAMES
        if writes_text and any(getattr(text, "vocab_size", None) for text in texts):
            kinds |= {type(part) for key, part in parts.items() if _TOWER.search(key) and part is not None}
    return towers


def _without_half_shared(model: nn.Module, found: list[Candidate]) -> list[Candidate]:
    """Skip weights that overlap another Parameter, or that a dense module uses too."""
    others = overlapping_tensors(model)

    def skip(reason: str, weights: Collection[int]) -> list[Candidate]:
        return [
            each._replace(skipped=reason.format(others.get(id(each.weight))))
            if each.skipped is None and id(each.weight) in weights
            else each
            for each in found
        ]

    found = skip("its weight shares memory with {}, another Parameter", others)
    chosen = {(id(candidate.module), candidate.parameter) for candidate in found if candidate.skipped is None}
    dense = {id(p) for m in model.modules() for name, p in m._parameters.items() if (id(m), name) not in chosen}
    # While `from_pretrained` loads, tied weights are not yet one Parameter.
    named, tied = dict(model.named_parameters(remove_duplicate=False)), getattr(model, "all_tied_weights_keys", None)
    dense |= {id(named[name]) for name, source in (tied or {}).items() if id(named.get(source)) in dense}
    return skip("its weight is shared with a module that stays dense", dense)
