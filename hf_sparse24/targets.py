"""Which layers become sparse: found by structure and by the field's usual names, without a table of models."""

import re
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .config import TARGET_GROUPS, Sparse24Config
from .linear import Sparse24Layer
from .methods import METHODS

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


def find_candidates(model: nn.Module, config: Sparse24Config) -> list[Candidate]:
    """Every linear layer of `model` in module order, each once however often it is shared, with its verdict.

    Stacked experts (3-D parameters) are listed as well, as skipped.

    Raises:
        ValueError: an ending in a list of `target_modules` that no linear layer's name has.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    _check_endings(config.target_modules, linears)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    found = []
    for name, module in model.named_modules():
        if name in linears:
            path = _path(model, name)
            if module is output or id(module.weight) in embeddings:
                reason = "output embedding"
            elif _block_index(path) is None:
                reason = "outside the repeated blocks: a head, a pooler or an embedding projection"
            elif any(_ROUTER.search(text) for text in _names_in_block(path)):
                reason = "router"
            else:
                reason = _not_wanted(name, path, config) or _cannot_be_sparse(module, config)
            found.append(Candidate(name, module, reason))
        elif _is_stacked_experts(name, module):
            found.append(Candidate(name, module, "stacked experts (3-D parameters) are not supported yet"))
    return found


def _is_stacked_experts(name: str, module: nn.Module) -> bool:
    named_so = "expert" in type(module).__name__.lower() or "expert" in name.rpartition(".")[2]
    return named_so and any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))


def _check_endings(target_modules, linears: dict[str, nn.Module]) -> None:
    if not isinstance(target_modules, list):
        return
    unmatched = [ending for ending in target_modules if not any(_ends_with(name, [ending]) for name in linears)]
    if unmatched:
        endings = sorted({name.rpartition(".")[2] for name in linears})
        raise ValueError(
            f"target_modules={target_modules!r}: no linear layer's name ends in {unmatched}; the model has {endings}"
        )


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


def _matches(name: str, path: list[tuple[str, nn.Module]], selector: str | list[str]) -> bool:
    if isinstance(selector, list):
        return _ends_with(name, selector)
    if selector in TARGET_GROUPS:
        return selector == "all-linear" or _sublayer(path) == selector
    return re.fullmatch(selector, name) is not None


def _ends_with(name: str, endings: list[str]) -> bool:
    return any(name == ending or name.endswith("." + ending) for ending in endings)


def _not_wanted(name: str, path: list[tuple[str, nn.Module]], config: Sparse24Config) -> str | None:
    if not _matches(name, path, config.target_modules):
        return f"not in target_modules={config.target_modules!r}"
    if config.exclude_modules is not None and _matches(name, path, config.exclude_modules):
        return f"in exclude_modules={config.exclude_modules!r}"
    layers = config.layers_to_transform
    if layers is not None and _block_index(path) not in (layers if isinstance(layers, list) else [layers]):
        return f"block not in layers_to_transform={layers!r}"
    return None


def _cannot_be_sparse(module: nn.Module, config: Sparse24Config) -> str | None:
    if isinstance(module, Sparse24Layer):
        return None
    if not _is_plain_linear(type(module)):
        return f"its class {type(module).__name__} is not a plain linear layer"
    inputs, outputs = module.weight.shape if isinstance(module, Conv1D) else module.weight.shape[::-1]
    if inputs % config.m:
        return f"input size {inputs} is not a multiple of {config.m}"
    if config.activations == "2:4" and inputs % 4:
        return f"input size {inputs} is not a multiple of 4, as activations='2:4' needs"
    if METHODS[config.method].needs_square_groups and outputs % config.m:
        return f"output size {outputs} is not a multiple of {config.m}, as {config.method!r} needs"
    return None


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
