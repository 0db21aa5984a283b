"""PEFT on sparse models, in `get_peft_model` and `PeftModel.from_pretrained` as they are.

`register_tuners` replaces every tuner in PEFT's registries by a subclass of itself that knows sparse layers. By them
PEFT finds the tuner of an adapter's type in `get_peft_model`, `PeftModel.from_pretrained`, and Transformers'
`add_adapter` and `load_adapter`. On a model without sparse layers the subclasses do what PEFT does.

An adapter computes something else on another base. So its `adapter_config.json` has the method and the pattern of its
base, under the key `sparse24` of PEFT's `auto_mapping`, and a base that is dense, or sparse in another way, is refused.
PEFT itself records only where the base was loaded from.
"""

import functools
from importlib.util import find_spec
from typing import Any

from torch import nn

from ..config import SavedConfig
from ..patching.ownership import adopt
from ..progress import get_logger
from ..run import sparse_run
from ..weights.sparse_weight import sparse_weights
from ..weights.storage import PACKED, Storage, name_without_adapters
from .attaching import attaching
from .bypass import check_adapters
from .merging import check_mergeable, sharing_adapters, warn_of_filled_zeros

logger = get_logger(__name__)

KEY = "sparse24"


def record_base(model: nn.Module, config: Any) -> None:
    """Let the `PeftConfig` of an adapter that is about to be added save by what its base is sparse. ValueError: a
    loaded one is of a base that is sparse by another method or pattern. Warn where its base was dense, unlike this."""
    recorded, found = (config.auto_mapping or {}).get(KEY), _sparse_by(model)
    if recorded not in (None, found):
        fields = ", ".join(f"{name}={value!r}" for name, value in recorded.items())
        way = f"load that base (base_model_name_or_path={config.base_model_name_or_path!r}), or call "
        way += f"patch_model(model, Sparse24Config({fields})) on the dense one first"
        raise ValueError(f"the adapter was trained on a base with {recorded}, this model is {found or 'dense'}: {way}")
    if recorded is None and found and config.inference_mode:  # not a new one
        way = "the masks of this sparse model change what it computes: load it on the model that it was trained on"
        logger.warning(f"the adapter was trained on a dense base, and {way}")
    config.__dict__.pop("save_pretrained", None)  # of another model that it was used for
    if found is not None:
        # PEFT overwrites `auto_mapping` while it saves, and a new config with one is not told from a loaded one.
        config.save_pretrained = functools.partial(_save_pretrained, config, found)


def _sparse_by(model: nn.Module) -> dict[str, str] | None:
    """The method and pattern of a model that computes with sparse or packed weights, None of any other."""
    run = sparse_run(model)
    saved = run.saved if run else getattr(getattr(model, "config", None), "quantization_config", None)
    if not isinstance(saved, SavedConfig) or (run and run.is_dense):
        return None
    return {"method": saved.config.method, "pattern": saved.config.pattern}


def _save_pretrained(
    config: Any, base: dict[str, str], directory: str, auto_mapping_dict: dict[str, Any] | None = None, **kwargs: Any
) -> None:
    """Save a `PeftConfig` as its class does, with what its base is sparse by."""
    mapping = (auto_mapping_dict or config.auto_mapping or {}) | {KEY: base}
    type(config).save_pretrained(config, directory, auto_mapping_dict=mapping, **kwargs)


class SparseAware:
    """The methods of PEFT's `BaseTuner` that the subclasses of all tuners extend."""

    def inject_adapter(self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Add an adapter to all layers that it targets. After a ValueError the model may have a part of it."""
        record_base(model, self.peft_config[adapter_name])
        super().inject_adapter(model, adapter_name, *args, **kwargs)  # type: ignore[misc]  # the tuner's
        check_adapters(model)
        if shared := sharing_adapters(model):
            logger.warning(
                f"{len(shared)} adapters share weights, so they train and are not merged, such as {shared[0]}"
            )
        adopt(model)  # copies that `modules_to_save` trains

    def _prepare_model(self: Any, peft_config: Any, model: nn.Module) -> None:
        """Refuse targets that cannot be adapted; PEFT calls this before it changes the model."""
        targets = (getattr(peft_config, field, None) or () for field in ("target_parameters", "modules_to_save"))
        _check_targets(model, *targets)
        super()._prepare_model(peft_config, model)  # type: ignore[misc]

    def _create_and_replace(
        self, peft_config: Any, adapter_name: str, target: Any, name: str, parent: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        with attaching(parent, name, adapter_name):
            super()._create_and_replace(peft_config, adapter_name, target, name, parent, *args, **kwargs)  # type: ignore[misc]

    def _check_merge_allowed(self: Any) -> None:
        super()._check_merge_allowed()  # type: ignore[misc]
        check_mergeable(self.model)
        warn_of_filled_zeros(self.model)


def _check_targets(model: nn.Module, parameters: Any, modules: Any) -> None:
    """Raise ValueError where an adapter would replace a sparse weight, or train a copy of a packed one."""
    for name in map(name_without_adapters, sparse_weights(model, Storage)):
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
    # The tuner that mixes others is in no registry: `get_peft_model(..., mixed=True)` takes it by its name.
    mixed: Any = mixed_model
    if not issubclass(mixed.MixedModel, SparseAware):
        mixed.MixedModel = _sparse_aware(mixed.MixedModel)


@functools.cache
def _sparse_aware(tuner: type) -> type:
    # It keeps the tuner's name, and is found by it in this module: pickle stores classes so.
    made = type(tuner.__name__, (SparseAware, tuner), {"__module__": __name__, "__doc__": tuner.__doc__})
    return globals().setdefault(tuner.__name__, made)
