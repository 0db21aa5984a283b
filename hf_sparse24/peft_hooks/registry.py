"""register_tuners replaces every tuner in PEFT's registries by a subclass of itself that knows sparse layers.

By them PEFT finds the tuner of an adapter's type in `get_peft_model`, `PeftModel.from_pretrained`, and Transformers'
`add_adapter` and `load_adapter`. On a model without sparse layers the subclasses do what PEFT does.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

from torch import nn

from ..adapters import check_adapters
from ..adapters.attaching import WHEN_ATTACHED, attaching
from ..adapters.merging import check_mergeable
from ..patching.ownership import adopt
from ..progress import get_logger
from ..weights.sparse_weight import sparse_weights
from ..weights.storage import PACKED, Storage
from .origin import KEY, MASKED_TYPE, check_origin, record_late, record_masks, record_origin

logger = get_logger(__name__)


class SparseAware:
    """The methods of PEFT's `BaseTuner` that the subclasses of all tuners extend."""

    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Add an adapter to all layers that it targets. After a ValueError the model may have a part of it."""
        config = self.peft_config[adapter_name]
        has_record = KEY in (config.auto_mapping or {})
        check_origin(model, config)
        record_origin(model, config)
        super().inject_adapter(model, adapter_name, *args, **kwargs)  # type: ignore[misc]  # the tuner's
        is_masked = record_masks(model, config, adapter_name)
        if is_masked and config.inference_mode and not has_record:  # one that was loaded
            way = "the masks of this sparse model change what it computes: load it on the model that it was trained on"
            logger.warning(f"adapter {adapter_name!r} was trained without masks, and {way}")
        if not config.inference_mode:
            check_adapters(model)
        adopt(model)  # copies that `modules_to_save` trains

    def _prepare_model(self: Any, peft_config: Any, model: nn.Module) -> None:
        """Refuse targets that cannot be adapted; PEFT calls this before it changes the model."""
        targets = (getattr(peft_config, field, None) or () for field in ("target_parameters", "modules_to_save"))
        _check_targets(model, *targets)
        super()._prepare_model(peft_config, model)  # type: ignore[misc]

    def _create_and_replace(
        self, peft_config: Any, adapter_name: str, target: Any, name: str, parent: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        """Add an adapter to one layer."""
        with attaching(parent, name, adapter_name):
            super()._create_and_replace(peft_config, adapter_name, target, name, parent, *args, **kwargs)  # type: ignore[misc]

    def _check_merge_allowed(self: Any) -> None:
        super()._check_merge_allowed()  # type: ignore[misc]
        check_mergeable(self.model)


def _check_targets(model: nn.Module, parameters: Any, modules: Any) -> None:
    """Raise ValueError where an adapter would replace a sparse weight, or train a copy of a packed one."""
    for name in (name.replace(".base_layer", "") for name in sparse_weights(model, Storage)):
        for target in parameters:
            if f".{name}".endswith(f".{target}"):
                # PEFT makes target_parameters of the target_modules of stacked experts.
                way = "target other layers, or call unpatch_model(model) (unpack_model if it is packed)"
                raise ValueError(f"target_parameters={target!r} names {name}, which an adapter would make dense: {way}")
    for name, module in model.named_modules():
        if any(name.endswith(target) for target in modules) and sparse_weights(module, PACKED):  # as PEFT compares them
            way = "call unpack_model(model) first (and patch_model after it, to stay sparse), or name other modules"
            raise ValueError(f"modules_to_save={list(modules)!r} names {name}, a packed module: {way}")


def register_tuners() -> None:
    """Replace the tuners in PEFT's registries, where PEFT is installed; a second call changes nothing."""
    if find_spec("peft") is None:
        return
    from peft import mapping, mixed_model
    from peft.tuners.tuners_utils import BaseTuner

    for registry in (mapping.PEFT_TYPE_TO_TUNER_MAPPING, mapping.PEFT_TYPE_TO_MIXED_MODEL_MAPPING):
        for kind, tuner in registry.items():
            if issubclass(tuner, BaseTuner) and not issubclass(tuner, SparseAware):
                registry[kind] = _sparse_aware(tuner)
    # What is made of a file with this type is a plain LoraConfig, which sets its `peft_type` itself.
    configs: Any = mapping.PEFT_TYPE_TO_CONFIG_MAPPING
    configs[MASKED_TYPE] = configs["LORA"]
    WHEN_ATTACHED[:] = [record_late]
    # The tuner that mixes others is in no registry: `get_peft_model(..., mixed=True)` takes it by its name.
    mixed: Any = mixed_model
    if not issubclass(mixed.MixedModel, SparseAware):
        mixed.MixedModel = _sparse_aware(mixed.MixedModel)


@cache
def _sparse_aware(tuner: type) -> type:
    # It keeps the tuner's name, and is found by it in this module: pickle stores classes so.
    made = type(tuner.__name__, (SparseAware, tuner), {"__module__": __name__, "__doc__": tuner.__doc__})
    return globals().setdefault(tuner.__name__, made)
