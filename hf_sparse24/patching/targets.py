"""Finds the layers that become sparse, by structure and by the field's usual names, without a table of models."""

import inspect
import re
from collections.abc import Collection
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from sparse24_kernels import Pattern
from sparse24_kernels.checks import INPUTS as PRUNABLE
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D

from ..adapters import bypasses_layer, is_adapter
from ..layers.sparse_module import SparseModule
from ..methods import SparseMethod
from ..module_names import TARGET_GROUPS, ModuleNames, ends_with
from ..run import SparseRun
from ..weights.storage import layer_name
from .places import Place, find_place
from .stacks import find_input_dim, gradient_note, is_stacked_experts, stacked_parameters, unsupported_method

# Transformers' names of the sub-configs of towers: `vision_config`, `audio_config`, `audio_encoder` and the like.
_TOWER = re.compile(r"vision|image|video|audio|speech")
# Types of configs of which Transformers has a model that writes text.
_WRITING_TEXT = {
    *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}

CONVOLUTION = "a convolution: only linear layers become sparse"


class Candidate(NamedTuple):
    """A linear layer or a stack of experts' weights, and why it stays dense (`skipped=None`: it becomes sparse).

    Or a convolution, which always stays dense.

    Attributes:
        name: of the layer; of a stack, its Parameter's name, `model.layers.0.mlp.experts.gate_up_proj`.
        parameter: the weight's name in `module`.
        note: how the method treats it differently from other layers, None if it does not.
        against: the rule that keeps it dense unless its whole name is in `target_modules`, None without one.
        pattern: N:M of the layer, None for that of the model.
    """

    name: str
    module: nn.Module
    skipped: str | None
    parameter: str = "weight"
    note: str | None = None
    against: str | None = None
    pattern: Pattern | None = None

    @property
    def weight(self) -> Tensor:
        return cast(Tensor, self.module._parameters[self.parameter])

    @property
    def is_stack(self) -> bool:
        return self.weight.dim() == 3

    @property
    def input_dim(self) -> int:
        """Which of the weight's dimensions is the input dimension, -1 or -2."""
        found = find_input_dim(self.module, self.parameter)
        assert found is not None  # otherwise it is skipped
        return found


def find_candidates(model: nn.Module, run: SparseRun) -> list[Candidate]:
    """Return every linear layer and stack of experts' weights of `model` once, in module order, with its verdict.

    Convolutions follow, so that a report can say why they stay dense.

    Raises:
        ValueError: a name, an expression or a block index in the run's config that none of them has.
    """
    config = run.config
    places: dict[str, Place] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            # A parametrized layer (weight_norm and the like) has no weight of its own to keep.
            parameters = ["weight"] if module._parameters.get("weight") is not None else []
        else:
            parameters = stacked_parameters(module) if is_stacked_experts(name, module) else []
        for parameter in parameters:
            places[layer_name(f"{name}.{parameter}".removeprefix("."))] = find_place(model, name, parameter)
    targets = _picked("target_modules", config.target_modules, places)
    excluded = _picked("exclude_modules", config.exclude_modules, places)
    named = ModuleNames("target_modules", config.target_modules).endings
    blocks = _chosen_blocks(config.layers_to_transform, places)
    patterns: dict[str, Pattern] = {}
    for names, pattern in (config.layer_patterns or {}).items():
        chosen = _picked("layer_patterns", names, places)
        if places and not chosen & targets:
            raise ValueError(
                f"layer_patterns={names!r}: none of its layers is in target_modules={config.target_modules!r}"
            )
        for name in chosen:
            patterns.setdefault(name, Pattern.parse(pattern))
    towers = _towers(model) if config.target_modules in TARGET_GROUPS else {}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    get_output: Any = getattr(model, "get_output_embeddings", lambda: None)
    output = get_output()

    def rule(place: Place) -> str | None:
        module = place.path[-1][1]
        if module is output or id(module._parameters[place.parameter]) in embeddings:
            return "output embedding"
        if place.block is None:
            return "outside the repeated blocks (nn.ModuleList): a head, a pooler or an embedding projection"
        return "router" if place.is_router else None

    def reason(name: str, place: Place) -> str | None:
        if name not in targets:
            return f"not in target_modules={config.target_modules!r}"
        if name in excluded:
            return f"in exclude_modules={config.exclude_modules!r}"
        if place.block is not None and place.block not in blocks:
            return f"block not in layers_to_transform={config.layers_to_transform!r}"
        tower = next((towers[id(around)] for _, around in place.path if id(around) in towers), None)
        if tower is not None:
            return f"in {tower}, which does not read text; only names and expressions in target_modules reach it"
        method = run.method_of(patterns.get(name, run.method.pattern))
        return _cannot_be_sparse(place.path, place.parameter, method)

    found = []
    for name, place in places.items():
        against = rule(place)
        wins = any(whole in place.names for whole in named)
        skipped = reason(name, place) if against is None or wins else against
        candidate = Candidate(name, place.path[-1][1], skipped, place.parameter, against=against)
        if candidate.skipped is None and candidate.is_stack:
            candidate = candidate._replace(note=gradient_note(run.method))
        if candidate.skipped is None and name in patterns:
            own = f"{patterns[name]}"
            note = own if candidate.note is None else f"{own}, {candidate.note}"
            candidate = candidate._replace(pattern=patterns[name], note=note)
        found.append(candidate)
    convolutions = [
        Candidate(name, module, CONVOLUTION)
        for name, module in model.named_modules()
        if isinstance(module, _ConvNd) and module._parameters.get("weight") is not None
    ]
    return [*_without_half_shared(model, found), *convolutions]


def _picked(field: str, value: str | list[str] | None, places: dict[str, Place]) -> set[str]:
    """Return the layers that a field of the config names. What it names must exist, so that a typo is noticed."""
    if value is None:
        return set()
    selector = ModuleNames(field, value)
    picked = {name for name, place in places.items() if selector.picks(place.names, place.sublayer)}
    every_name = [name for place in places.values() for name in place.names]
    unmatched = [end for end in selector.endings if not any(ends_with(name, end) for name in every_name)]
    if places and (unmatched or not picked):
        if unmatched:
            what = f"no linear layer's name ends in {unmatched}"
        elif selector.group:
            what = "no linear layer is part of one"
        else:
            what = "no linear layer's whole name matches this regular expression (begin it with '.*' to match endings)"
        endings = sorted({name.rpartition(".")[2] for name in places})
        has = f"the model has {endings}, such as {next(iter(places))!r}; groups are {list(TARGET_GROUPS)}"
        raise ValueError(f"{field}={value!r}: {what}; {has}")
    return picked


def _chosen_blocks(layers: int | list[int] | None, places: dict[str, Place]) -> set[int]:
    blocks = {place.block for place in places.values() if place.block is not None}
    if layers is None:
        return blocks
    chosen = set(layers if isinstance(layers, list) else [layers])
    if blocks and not chosen <= blocks:
        raise ValueError(f"layers_to_transform={layers!r}: the blocks with linear layers are {sorted(blocks)}")
    return chosen


def _towers(model: nn.Module) -> dict[int, str]:
    """Return the classes of the parts of a multi-modal language model that read images or sound, by the part's id.

    Such a part has a sub-config with such a name. A model without a vocabulary is no language model and has none, nor
    has a model that compares images or sound with text, as CLIP does: its towers are equals.
    """
    kinds: set[type] = set()
    towers = {}
    writes_text = False
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
    """Skip weights that a dense module or, in part of their memory, another Parameter uses as well.

    The first could not be both when the model is unpatched; the second would be pruned twice, in groups that differ.
    """
    views = _overlapping(model)

    def skip(skipped: str, weights: Collection[int]) -> list[Candidate]:
        return [
            each._replace(skipped=skipped.format(views.get(id(each.weight))))
            if each.skipped is None and id(each.weight) in weights
            else each
            for each in found
        ]

    found = skip("its weight shares memory with {}, another Parameter", views)
    chosen = {(id(candidate.module), candidate.parameter) for candidate in found if candidate.skipped is None}
    dense = {id(p) for m in model.modules() for name, p in m._parameters.items() if (id(m), name) not in chosen}
    return skip("its weight is shared with a module that stays dense", dense)


def _overlapping(model: nn.Module) -> dict[int, str]:
    """Return the Parameters and buffers that overlap another one in memory, by id, with the other's name."""
    spans = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor.data) is Tensor and tensor.layout == torch.strided and tensor.numel() and not tensor.is_meta:
            extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
            start = tensor.data_ptr()
            spans.append((str(tensor.device), start, start + extent * tensor.element_size(), id(tensor), name))
    spans.sort()
    found = {}
    for i, (device, _, end, key, name) in enumerate(spans):
        for other_device, other_start, _, other_key, other_name in spans[i + 1 :]:
            if other_device != device or other_start >= end:
                break
            found[key], found[other_key] = other_name, name
    return found


def _cannot_be_sparse(path: list[tuple[str, nn.Module]], parameter: str, method: SparseMethod) -> str | None:
    """Return why a weight cannot be sparse, None if it can."""
    module, parent = path[-1][1], path[-2 if len(path) > 1 else -1][1]  # a model may be one layer
    if _is_adapter(path):
        return "an adapter"
    if isinstance(module, SparseModule) and parameter in module.sparse24:
        return None
    weight = cast(Tensor, module._parameters[parameter])
    is_stack = weight.dim() == 3
    if is_adapter(parent) and (is_stack or bypasses_layer(parent)):
        return f"its adapter ({type(parent).__name__}) computes with its weight without calling it"
    module_class: type = type(module)
    if not is_stack and not _is_plain_linear(module_class):
        return f"its class {module_class.__name__} is not a plain linear layer"
    parent_class: type = type(parent)
    if _reads_weight(parent_class, path[-1][0], parameter):
        return f"{parent_class.__name__} uses its weight without calling it"
    if is_stack:
        input_dim, reason = find_input_dim(module, parameter), unsupported_method(method)
        if input_dim is None:
            reason = f"{module_class.__name__} does not say how it multiplies by {parameter}"
        if reason is not None:
            return reason
    else:
        input_dim = -2 if isinstance(module, Conv1D) else -1
    rows, columns = weight.shape[-2:]
    outputs, inputs = (rows, columns) if input_dim == -1 else (columns, rows)
    return _unsupported_weight(weight) or method.unsupported(outputs, inputs)


def _unsupported_weight(weight: Tensor) -> str | None:
    """Return why no method can prune a weight, whatever its sizes; None if one can."""
    if weight.dtype not in PRUNABLE:
        return f"its weight is {weight.dtype}; fp64, fp32, bf16 and fp16 can be pruned"
    if weight.layout != torch.strided:
        return f"the layout of its weight is {weight.layout}, not dense"
    if not weight.numel():
        return "its weight is empty"
    if 0 in weight.stride():
        return "its weight is expanded: elements share memory"
    return None


def _is_adapter(path: list[tuple[str, nn.Module]]) -> bool:
    """Return whether PEFT has added a layer beside a `base_layer`."""
    return any(part != "base_layer" and is_adapter(parent) for (_, parent), (part, _) in pairwise(path))


@cache
def _reads_weight(parent: type, name: str, parameter: str) -> bool:
    """Return whether a class computes with `self.<name>.<parameter>` itself, as `nn.MultiheadAttention` does.

    Such a class bypasses a sparse layer's forward. Its source code tells. Reading a weight's dtype or class is no
    computation, and slices of a layer's weight are Bloom's emulation of tensor parallelism, off by default.
    """
    try:
        source = inspect.getsource(parent)
    except (OSError, TypeError):
        return False
    attribute = rf"self\.{re.escape(name)}\.{re.escape(parameter)}\b"
    harmless = r"\.(?:dtype|device|shape)\b" + (r"|\[" if parameter == "weight" else "")
    uses = re.finditer(rf"(isinstance\()?{attribute}({harmless})?", source)
    return any(use[1] is None and use[2] is None for use in uses)


@cache
def _is_plain_linear(cls: type) -> bool:
    """Return whether a small instance of a class computes what `nn.Linear` or `Conv1D` does, as `FalconLinear` does."""
    if cls in (nn.Linear, Conv1D):
        return True
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            probe, x = cls(8, 4), torch.randn(3, 8)
            return torch.allclose(probe(x), nn.functional.linear(x, probe.weight, probe.bias), atol=1e-6)
    except Exception:  # whatever a foreign constructor or forward raises, it is not a plain linear layer
        return False
