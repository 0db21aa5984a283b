"""PEFT's registries of tuners, in which every tuner is replaced by a subclass of itself that knows sparse layers.

PEFT has no hook for base layers of another library but this: it looks up by the adapter's type which tuner puts it into
a model, in `get_peft_model`, `PeftModel.from_pretrained`, and in Transformers' `add_adapter` and `load_adapter`. On a
model without sparse layers the subclasses do what PEFT does.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

from torch import nn

from ..adapters.attaching import attaching
from ..adapters.merging import check_mergeable
from ..patching import adopt
from .origin import check_origin, record_origin


class SparseAware:
    """What the subclasses of all tuners add to them, in methods of PEFT's `BaseTuner`."""

    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Add an adapter to all layers that it targets, also where it is loaded from a file."""
        config = self.peft_config[adapter_name]
        check_origin(model, config)
        record_origin(model, config)
        super().inject_adapter(model, adapter_name, *args, **kwargs)  # type: ignore[misc]  # the tuner's
        adopt(model)  # copies that `modules_to_save` trains

    def _create_and_replace(
        self, peft_config: Any, adapter_name: str, target: Any, name: str, parent: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        """Add an adapter to one layer."""
        with attaching(parent, name, adapter_name):
            super()._create_and_replace(peft_config, adapter_name, target, name, parent, *args, **kwargs)  # type: ignore[misc]

    def _check_merge_allowed(self: Any) -> None:
        super()._check_merge_allowed()  # type: ignore[misc]
        check_mergeable(self.model)


def register_tuners() -> None:
    """Replace the tuners in PEFT's registries, where PEFT is installed; twice is as good as once."""
    if find_spec("peft") is None:
        return
    from peft import mapping, mixed_model
    from peft.tuners.tuners_utils import BaseTuner

    for registry in (mapping.PEFT_TYPE_TO_TUNER_MAPPING, mapping.PEFT_TYPE_TO_MIXED_MODEL_MAPPING):
        for kind, tuner in registry.items():
            if issubclass(tuner, BaseTuner) and not issubclass(tuner, SparseAware):
                registry[kind] = _sparse_aware(tuner)
    # The tuner that mixes others is in no registry: `get_peft_model(..., mixed=True)` takes it by its name.
    mixed: Any = mixed_model
    if not issubclass(mixed.MixedModel, SparseAware):
        mixed.MixedModel = _sparse_aware(mixed.MixedModel)


@cache
def _sparse_aware(tuner: type) -> type:
    # It keeps the tuner's name, and is found by it in this module: pickle stores classes so.
    made = type(tuner.__name__, (SparseAware, tuner), {"__module__": __name__, "__doc__": tuner.__doc__})
    return globals().setdefault(tuner.__name__, made)
