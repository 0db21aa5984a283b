"""The seam between the core and the outer ring: the questions that the core asks about adapters and the Hub.

The core imports no file of the outer ring, no PEFT and no huggingface_hub. `hf_sparse24.peft` and `hf_sparse24.hub`
register their answers when `hf_sparse24` is imported. Until then adapters do nothing special, and nothing is shared.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn


def is_adapter(module: nn.Module) -> bool:
    """Whether a module is an adapter: one that PEFT puts around a `base_layer`."""
    return any(cls.__name__ == "BaseTunerLayer" for cls in type(module).__mro__)


def adapters_in(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if is_adapter(module)]


def check_unmerged(model: nn.Module) -> None:
    """Raise ValueError where an adapter is merged: unmerging would restore a layer that has changed since."""
    merged = next((name for name, module in model.named_modules() if is_adapter(module) and module.merged), None)
    if merged is not None:
        raise ValueError(f"{merged}: an adapter is merged into this layer; unmerge first: model.unmerge_adapter()")


def _do_nothing(*_: object) -> None: ...


@dataclass
class Extensions:
    """The registered answers, and those where none is registered."""

    # Let adapters around sparse layers act through their masks; ValueError: one computes with a layer's dense weight.
    check_adapters: Callable[[nn.Module], None] = _do_nothing
    # Say in a directory's card that its model is a training checkpoint, pushed to a repository; None: not pushed.
    describe_checkpoint: Callable[[Any, Any, str | None], None] = _do_nothing
    # Of a model, the directory of its export, the format and values of that: the text of its card, or None.
    describe_export: Callable[[Any, Path, str, str], str | None] = _do_nothing
    # Write the picture of a run that has ended, by its log, to its directory.
    draw_training: Callable[[Path, Sequence[Mapping[str, Any]]], None] = _do_nothing
    # Upload the export of a Trainer's model with a card of its run; returns where the commit is.
    push_run: Callable[[Any, Any, Mapping[str, Any]], Any] = _do_nothing
    # Functions of a model, which a patched one has in place of methods.
    model_methods: dict[str, Callable] = field(default_factory=dict)


extensions = Extensions()
