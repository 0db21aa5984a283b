"""The seam between the core and the outer ring: the questions that the core asks about adapters and the Hub.

The core imports no file of the outer ring, no PEFT and no huggingface_hub. `hf_sparse24.peft` and `hf_sparse24.hub`
register their answers when `hf_sparse24` is imported. Until then adapters do nothing special, and nothing is shared.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn


def is_adapter(module: nn.Module) -> bool:
    """Whether a module is an adapter: one that PEFT puts around a `base_layer`."""
    return any(cls.__name__ == "BaseTunerLayer" for cls in type(module).__mro__)


def adapters_in(model: nn.Module) -> list[Any]:
    """The adapters in a model."""
    return [module for module in model.modules() if is_adapter(module)]


class Adapters:
    """Answers where no adapters exist; `peft.PeftAdapters` has those for PEFT's."""

    def check(self, model: nn.Module) -> None:
        """Let the adapters around sparse layers act through their masks. ValueError: one computes with the dense weight
        of a sparse layer."""

    def check_unmerged(self, model: nn.Module) -> None:
        """Raise ValueError where an adapter is merged."""


class Hub:
    """Answers where nothing is shared; `hub.push` registers those with a model card and huggingface_hub."""

    def describe_checkpoint(self, model: Any, directory: Any, repo_id: str | None) -> None:
        """Say in a directory's card that its model is a training checkpoint, pushed to `repo_id`; None: not pushed."""

    def draw_training(self, directory: Path, log_history: Sequence[Mapping[str, Any]]) -> None:
        """Write the picture of a run that has ended to its directory."""

    def push_run(self, trainer: Any, model: Any, options: Mapping[str, Any]) -> Any:
        """Upload the export of a Trainer's model with a card of its run, and return where the commit is."""
        raise RuntimeError("cannot push: import hf_sparse24, which registers hf_sparse24.hub")


class Extensions:
    """The registered answers. `model_methods` are functions of a model, which a patched one has in place of methods."""

    def __init__(self) -> None:
        self.adapters = Adapters()
        self.hub = Hub()
        self.model_methods: dict[str, Callable] = {}


extensions = Extensions()
