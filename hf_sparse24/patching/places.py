"""Where linear layers and stacks of experts stand in a model: their names, their block and their sublayer."""

import re
from typing import NamedTuple

from torch import nn

from ..weights.storage import layer_name

# Usual names of modules, and of their classes, in an attention or a feed-forward sublayer.
_ATTENTION = re.compile(r"attn|attentions?\d*$|^attention", re.IGNORECASE)
_FEED_FORWARD = re.compile(
    r"mlp|ffn|feed_?forward|^ff(_|$)|^fc_?\d|^lin\d|^pwconv|intermediate|^output$|dense_?relu|layerff|experts?$",
    re.IGNORECASE,
)
# Layers that pick experts or tokens: a wrong pick costs more than their few weights save.
_ROUTER = re.compile(r"^(shared_expert_)?gate$|router|indexer", re.IGNORECASE)


class Place(NamedTuple):
    """The position of a linear layer or a stack of experts' weights in the model, and its names.

    Attributes:
        path: the modules from the model down to the one that has the weight, each with its own component of the name.
        parameter: the weight's name in that module.
        names: in this model, and in the model with or without its head (`model.layers.0...`, `layers.0...`); of a
            stack, the names of its Parameter and of its module.
        block: the index of its repeated block, None outside any.
        sublayer: `"attention"`, `"mlp"` or None.
    """

    path: list[tuple[str, nn.Module]]
    parameter: str
    names: list[str]
    block: int | None
    sublayer: str | None
    is_router: bool


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
    names = dict.fromkeys([*own, *(each.replace(".base_layer", "").removeprefix("base_model.model.") for each in own)])
    aliases = [alias for own in names for alias in _aliases(model, own)]
    return Place(path, parameter, aliases, block, _sublayer(texts), any(map(_ROUTER.search, texts)))


def _aliases(model: nn.Module, name: str) -> list[str]:
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix:
        return [name]
    return [name, name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else f"{prefix}.{name}"]


def _sublayer(names: list[str]) -> str | None:
    if any(_ATTENTION.search(text) for text in names):
        return "attention"
    return "mlp" if any(_FEED_FORWARD.search(text) for text in names) else None
