"""PEFT on sparse models, in `get_peft_model` and `PeftModel.from_pretrained` as they are.

`register_tuners` replaces every tuner in PEFT's registries by a subclass of itself that knows sparse layers. By them
PEFT finds the tuner of an adapter's type in `get_peft_model`, `PeftModel.from_pretrained`, and Transformers'
`add_adapter` and `load_adapter`. On a model without sparse layers the subclasses do what PEFT does.

They write into an adapter's `adapter_config.json` which sparse weights it was trained on, and compare that where it is
loaded. PEFT records only where the base was loaded from, and a model that was patched in memory comes from a dense
checkpoint. So PEFT's `auto_mapping` of an adapter on sparse layers has a key `sparse24`:

    config    the `Sparse24Config`, with its phase: a dense base is patched by it
    weights   the names of the sparse weights; their numbers are not compared

LoRA with masked layers has a `peft_type` that PEFT knows by `register_tuners` alone. Without this library, which adds
the masks, PEFT raises it as a KeyError.
"""

import copy
import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from ..config import SavedConfig
from ..extensions import ADAPTER_CONFIG
from ..files import read_json
from ..methods import method_class
from ..methods.base import DENSE_PHASE
from ..metrics import is_nm_sparse
from ..patching.masters import packed_config
from ..patching.ownership import adopt
from ..patching.surgery import patch_model, unpatch_model
from ..progress import get_logger
from ..run import patched_config, set_phase, sparse_run
from ..weights.sharding import whole
from ..weights.sparse_weight import sparse_weights
from ..weights.storage import PACKED, Storage, name_without_adapters
from .attaching import attaching
from .bypass import adapters_in, check_adapters
from .merging import check_mergeable

logger = get_logger(__name__)

KEY = "sparse24"
MASKED_TYPE = "LORA (import hf_sparse24, version 0.2 or later, before you load this adapter)"
"""The `peft_type` in the files of an adapter with masked layers, by which they are read: it stays as it is."""


def record_origin(model: nn.Module, config: Any) -> None:
    """Let the `PeftConfig` of an adapter that is about to be added save which base it is for."""
    config.__dict__.pop("save_pretrained", None)  # of another model that it was used for
    sparse = _config_of(model)
    if sparse is not None:
        # PEFT overwrites `auto_mapping` while it saves, and a new config with one is not told from a loaded one.
        names = _base_names(model)
        config.save_pretrained = functools.partial(_save_pretrained, config, type(model), sparse, names)


def record_masks(model: nn.Module, config: Any, adapter: str) -> bool:
    """Whether layers of an adapter that has been added act through a mask, which its config then saves."""
    has_record = "save_pretrained" in vars(config) and config.peft_type == "LORA"
    variants = [getattr(layer, "lora_variant", {}).get(adapter) for layer in adapters_in(model)]
    is_masked = has_record and any(getattr(variant, "is_masked", False) for variant in variants)
    if is_masked:
        config.save_pretrained = functools.partial(config.save_pretrained, is_masked=True)
    return is_masked


def record_late(model: nn.Module) -> None:
    """Let adapters that are older than the model's sparsity save the same."""
    for name, config in getattr(model, "peft_config", {}).items():
        if "save_pretrained" not in vars(config) and adapters_in(model):
            if str(getattr(config, "init_lora_weights", "")).startswith(("pissa", "olora", "corda")):
                what = f"init_lora_weights={config.init_lora_weights!r} took adapter {name!r} out of the dense weights"
                raise ValueError(f"{what}: call patch_model first, then get_peft_model")
            record_origin(model, config)
            record_masks(model, config, name)


def check_origin(model: nn.Module, config: Any) -> None:
    """Patch a dense model as a loaded adapter's record says; ValueError: its base is another, and stays as it was."""
    record = (config.auto_mapping or {}).get(KEY)
    if record is None:
        return
    trained_on, is_dense = SavedConfig.from_dict(record["config"]), _config_of(model) is None
    phase = trained_on.facts.phase
    if is_dense:
        try:
            patch_model(model, trained_on.config)
        except ValueError as error:
            raise ValueError(f"the adapter is for a sparse base, which this model cannot be made: {error}") from error
    difference = _difference(trained_on, record.get("weights"), model)  # earlier files have no names
    if difference:
        if is_dense:
            unpatch_model(model, sparse=False)
        way = f"load that base, from {config.base_model_name_or_path!r}; save a changed one by base.save_pretrained"
        raise ValueError(f"the adapter was trained on another base: {difference}; {way}")
    if is_dense and phase != DENSE_PHASE and not _has_zeros(model):
        said = f"the adapter's base is dense on disk and was patched with method={trained_on.config.method!r}"
        logger.warning(f"{said}. If it was trained between patch_model and the adapter, load that base")
    patched = patched_config(model)
    if patched is not None and phase in method_class(patched.method).phases and not adapters_in(model):
        set_phase(model, phase)


def recorded_config(directory: str | Path) -> Any:
    """The `Sparse24Config` in the files of an adapter, as a dict; None where they have none."""
    path = Path(directory) / ADAPTER_CONFIG
    if not path.is_file():
        return None
    mapping = read_json(path).get("auto_mapping") or {}
    return mapping.get(KEY, {}).get("config")


def _config_of(model: nn.Module) -> SavedConfig | None:
    """The config of a patched or packed model, None for any other."""
    if sparse_weights(model, PACKED):
        config = getattr(getattr(model, "config", None), "quantization_config", None)
        return packed_config(config, None) if isinstance(config, SavedConfig) else None
    run = sparse_run(model)
    return None if run is None else run.saved


def _base_names(model: nn.Module) -> list[str]:
    """The names of the sparse and packed weights in the model without adapters."""
    names = [name_without_adapters(name).replace(".original_module", "") for name in sparse_weights(model, Storage)]
    return [name for name in names if ".modules_to_save." not in name]


def _difference(trained_on: SavedConfig, names: list[str] | None, model: nn.Module) -> str | None:
    """How a model differs from the base in an adapter's record, None where it does not."""
    found = _config_of(model)
    if found is None:  # packed by a config that is not ours
        return None
    # Masters may be packed or not.
    theirs, ours = (packed_config(saved, None).config for saved in (trained_on, found))
    fields = ["method", "pattern", "layer_patterns"]
    if ours.method == theirs.method:
        fields += method_class(ours.method).settings_of_state
    for field in fields:
        one, other = getattr(theirs, field), getattr(ours, field)
        if one != other:
            return f"it has {field}={one!r}, this model {other!r}"
    if names is not None and (others := sorted({*names} ^ {*_base_names(model)})):
        return f"{others[0]} is sparse in one of them alone ({len(others)} such weights; target_modules)"
    if sparse_weights(model, PACKED) and trained_on.facts.phase == DENSE_PHASE:
        return f"it has phase={DENSE_PHASE!r}, and this model is packed"
    pruning = trained_on.facts.pruning
    if pruning and found.facts.pruning != pruning and not _has_zeros(model):
        return f"its masks are those of oneshot ({pruning}), and this model was not pruned so"
    return None


def _has_zeros(model: nn.Module) -> bool:
    """Whether master weights are N:M already, as those of an export are."""
    weights = sparse_weights(model).values()
    return all(w.parameter.is_meta or is_nm_sparse(whole(w.parameter), *w.pattern, w.input_dim) for w in weights)


def _save_pretrained(
    config: Any,
    model_class: type,
    sparse: SavedConfig,
    names: list[str],
    save_directory: str,
    auto_mapping_dict: dict[str, Any] | None = None,
    is_masked: bool = False,
    **kwargs: Any,
) -> None:
    """`PeftConfig.save_pretrained`, with the record: the base's config as it is when the adapter is saved."""
    record = {"config": sparse.to_dict(), "weights": names}
    mapping = auto_mapping_dict or {"base_model_class": model_class.__name__, "parent_library": model_class.__module__}
    saved = copy.copy(config)
    if is_masked and sparse.facts.phase != DENSE_PHASE:
        saved.peft_type = MASKED_TYPE
    type(config).save_pretrained(saved, save_directory, auto_mapping_dict=mapping | {KEY: record}, **kwargs)


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
    # What is made of a file with this type is a plain LoraConfig, which sets its `peft_type` itself.
    configs: Any = mapping.PEFT_TYPE_TO_CONFIG_MAPPING
    configs[MASKED_TYPE] = configs["LORA"]
    # The tuner that mixes others is in no registry: `get_peft_model(..., mixed=True)` takes it by its name.
    mixed: Any = mixed_model
    if not issubclass(mixed.MixedModel, SparseAware):
        mixed.MixedModel = _sparse_aware(mixed.MixedModel)


@functools.cache
def _sparse_aware(tuner: type) -> type:
    # It keeps the tuner's name, and is found by it in this module: pickle stores classes so.
    made = type(tuner.__name__, (SparseAware, tuner), {"__module__": __name__, "__doc__": tuner.__doc__})
    return globals().setdefault(tuner.__name__, made)
