"""Which layers become sparse: found by structure and by the field's usual names, without a table of models."""

import inspect
import re
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .config import Sparse24Config
from .linear import Sparse24Layer
from .module_names import TARGET_GROUPS

# What a component of a module's name, or its class, is called in an attention or a feed-forward sublayer.
_ATTENTION = re.compile(r"attn|attentions?\d*$|^attention", re.IGNORECASE)
_FEED_FORWARD = re.compile(
    r"mlp|ffn|feed_?forward|^ff(_|$)|^fc_?\d|^lin\d|intermediate|^output$|dense_?relu|layerff|experts?$", re.IGNORECASE
)
# What picks experts or tokens; a wrong pick costs more than its few weights save.
_ROUTER = re.compile(r"^(shared_expert_)?gate$|router|indexer", re.IGNORECASE)


class Candidate(NamedTuple):
    """A linear layer of the model, and why it stays dense (`None`: it becomes sparse)."""

    name: str
    module: nn.Module
    skipped: str | None

    @property
    def weight(self) -> Tensor:
        """The layer's weight; for stacked experts their first 3-D parameter."""
        if "weight" in self.module._parameters:
            return cast(Tensor, self.module.weight)
        return next(parameter for parameter in self.module.parameters(recurse=False) if parameter.dim() == 3)


def find_candidates(model: nn.Module, config: Sparse24Config) -> list[Candidate]:
    """Every linear layer of `model` in module order, each once however often it is shared, with its verdict.

    `config` is bound to a method, which says what sizes it takes. Stacked experts (3-D parameters) are listed as well,
    as skipped.

    Raises:
        ValueError: an ending in a list of `target_modules` that no linear layer's name has.
    """
    linears = {
        name: module
        for name, module in model.named_modules()
        # A parametrized layer (weight_norm and the like) has no weight of its own to keep.
        if isinstance(module, nn.Linear | Conv1D) and "weight" in module._parameters
    }
    aliases = {name: _aliases(model, name) for name in linears}
    for field in ("target_modules", "exclude_modules"):
        _check_endings(field, getattr(config, field), [alias for names in aliases.values() for alias in names])
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    get_output: Any = getattr(model, "get_output_embeddings", lambda: None)
    output = get_output()
    found = []
    for name, module in model.named_modules():
        if name in linears:
            path = _path(model, name)
            reason: str | None
            if module is output or id(module.weight) in embeddings:
                reason = "output embedding"
            elif _block_index(path) is None:
                reason = "outside the repeated blocks (nn.ModuleList): a head, a pooler or an embedding projection"
            elif any(_ROUTER.search(text) for text in _names_in_block(path)):
                reason = "router"
            else:
                reason = _not_wanted(aliases[name], path, config) or _cannot_be_sparse(path, config)
            found.append(Candidate(name, module, reason))
        elif _is_stacked_experts(name, module):
            found.append(Candidate(name, module, "stacked experts (3-D parameters) are not supported yet"))
    return _without_half_shared(model, found)


def _without_half_shared(model: nn.Module, found: list[Candidate]) -> list[Candidate]:
    """A weight that a dense module uses as well stays dense: it cannot be both when the model is unpatched."""
    chosen = {id(candidate.module) for candidate in found if candidate.skipped is None}
    dense = {id(p) for m in model.modules() if id(m) not in chosen for p in m.parameters(recurse=False)}
    return [
        candidate._replace(skipped="its weight is shared with a module that stays dense")
        if candidate.skipped is None and id(candidate.weight) in dense
        else candidate
        for candidate in found
    ]


def _aliases(model: nn.Module, name: str) -> list[str]:
    """A layer's name in this model, and in the model with or without its head (`model.layers.0...`, `layers.0...`)."""
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix:
        return [name]
    return [name, name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else f"{prefix}.{name}"]


def _is_stacked_experts(name: str, module: nn.Module) -> bool:
    named_so = "expert" in type(module).__name__.lower() or "expert" in name.rpartition(".")[2]
    return named_so and any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))


def _check_endings(field: str, selector: str | list[str] | None, names: list[str]) -> None:
    if not isinstance(selector, list):
        return
    unmatched = [ending for ending in selector if not any(_ends_with(name, [ending]) for name in names)]
    if unmatched:
        endings = sorted({name.rpartition(".")[2] for name in names})
        raise ValueError(f"{field}={selector!r}: no linear layer's name ends in {unmatched}; the model has {endings}")


def _path(model: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """The modules from the model down to `name`, each with its own component of the name."""
    path = [("", model)]
    for part in name.split("."):
        path.append((part, getattr(path[-1][1], part)))
    return path


def _block_index(path: list[tuple[str, nn.Module]]) -> int | None:
    """Which repeated block a module belongs to: its place in the outermost ModuleList, None outside any."""
    for (_, parent), (part, _) in pairwise(path):
        if isinstance(parent, nn.ModuleList):
            return int(part)
    return None


def _names_in_block(path: list[tuple[str, nn.Module]]) -> list[str]:
    """What the layer and everything around it up to its block's ModuleList is called, by attribute and by class."""
    blocks = next(i for i, (_, module) in enumerate(path) if isinstance(module, nn.ModuleList))
    between = [text for part, module in path[blocks + 1 : -1] for text in (part, type(module).__name__)]
    return [path[blocks][0], *between, path[-1][0]]


def _sublayer(path: list[tuple[str, nn.Module]]) -> str | None:
    """`"attention"`, `"mlp"` or None."""
    names = _names_in_block(path)
    if any(_ATTENTION.search(text) for text in names):
        return "attention"
    return "mlp" if any(_FEED_FORWARD.search(text) for text in names) else None


def _matches(aliases: list[str], path: list[tuple[str, nn.Module]], selector: str | list[str]) -> bool:
    if isinstance(selector, str) and selector in TARGET_GROUPS:
        return selector == "all-linear" or _sublayer(path) == selector
    if isinstance(selector, list):
        return any(_ends_with(name, selector) for name in aliases)
    return any(re.fullmatch(selector, name) for name in aliases)


def _ends_with(name: str, endings: list[str]) -> bool:
    return any(name == ending or name.endswith("." + ending) for ending in endings)


def _not_wanted(aliases: list[str], path: list[tuple[str, nn.Module]], config: Sparse24Config) -> str | None:
    if not _matches(aliases, path, config.target_modules):
        return f"not in target_modules={config.target_modules!r}"
    if config.exclude_modules is not None and _matches(aliases, path, config.exclude_modules):
        return f"in exclude_modules={config.exclude_modules!r}"
    layers = config.layers_to_transform
    if layers is not None and _block_index(path) not in (layers if isinstance(layers, list) else [layers]):
        return f"block not in layers_to_transform={layers!r}"
    return None


def _cannot_be_sparse(path: list[tuple[str, nn.Module]], config: Sparse24Config) -> str | None:
    module = path[-1][1]
    if _is_adapter(path):
        return "an adapter"
    if isinstance(module, Sparse24Layer):
        return None
    layer_class: type = type(module)
    parent_class: type = type(path[-2][1])
    if not _is_plain_linear(layer_class):
        return f"its class {layer_class.__name__} is not a plain linear layer"
    if _reads_weight(parent_class, path[-1][0]):
        return f"{parent_class.__name__} uses its weight without calling it"
    sizes = cast(Tensor, module.weight).shape
    inputs, outputs = sizes if isinstance(module, Conv1D) else sizes[::-1]
    return config.bound_method.unsupported(outputs, inputs)


def _is_adapter(path: list[tuple[str, nn.Module]]) -> bool:
    """Whether a layer is one that PEFT has added beside a `base_layer`."""
    return any(
        part != "base_layer" and any(cls.__name__ == "BaseTunerLayer" for cls in type(parent).__mro__)
        for (_, parent), (part, _) in pairwise(path)
    )


@cache
def _reads_weight(parent: type, name: str) -> bool:
    """Whether a class computes with `self.<name>.weight` itself, as Mamba's mixer and `nn.MultiheadAttention` do.

    Such a class bypasses a sparse layer's forward. Judged by the source, where there is one. Asking a weight for
    its dtype or its class is no computation; slices of it are Bloom's emulation of tensor parallelism, off by default.
    """
    try:
        source = inspect.getsource(parent)
    except (OSError, TypeError):
        return False
    uses = re.finditer(rf"(isinstance\()?self\.{re.escape(name)}\.weight\b(\.(?:dtype|device|shape)\b|\[)?", source)
    return any(use[1] is None and use[2] is None for use in uses)


@cache
def _is_plain_linear(cls: type) -> bool:
    """Whether a class computes what `nn.Linear` or `Conv1D` computes, such as Falcon's own `FalconLinear`.

    Subclasses are judged by what they do: a small instance must give a linear layer's output.
    """
    if cls in (nn.Linear, Conv1D):
        return True
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            probe, x = cls(8, 4), torch.randn(3, 8)
            return torch.allclose(probe(x), nn.functional.linear(x, probe.weight, probe.bias), atol=1e-6)
    except Exception:  # whatever a foreign constructor or forward raises, it is not a plain linear layer
        return False
