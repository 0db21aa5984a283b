"""The record of an adapter's base: written into its `adapter_config.json`, compared where the adapter is loaded.

PEFT records only where the base was loaded from, and a model that was patched in memory comes from a dense checkpoint.
So PEFT's `auto_mapping` of an adapter on sparse layers has a key `sparse24`:

    config    the `Sparse24Config`, with its phase: a dense base is patched by it
    weights   the names of the sparse weights; their numbers are not compared

LoRA with masked layers has a `peft_type` that PEFT knows by `register_tuners` alone. Without this library, which adds
the masks, PEFT raises it as a KeyError.
"""

import copy
import functools
from pathlib import Path
from typing import Any

from torch import nn

from ..adapters.bypass import adapters_in
from ..config import SavedConfig
from ..files import read_json
from ..methods import method_class
from ..methods.context import DENSE_PHASE
from ..metrics import is_nm_sparse
from ..patching.masters import packed_config
from ..patching.surgery import patch_model, unpatch_model
from ..progress import get_logger
from ..run import patched_config, set_phase, sparse_run
from ..weights.sharding import whole
from ..weights.sparse_weight import sparse_weights
from ..weights.storage import PACKED, Storage

logger = get_logger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
KEY = "sparse24"
MASKED_TYPE = "LORA (import hf_sparse24, version 0.2 or later, before you load this adapter)"
"""The `peft_type` in the files of an adapter with masked layers."""


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
    own = (name.removeprefix("base_model.model.") for name in sparse_weights(model, Storage))
    names = [name.replace(".base_layer", "").replace(".original_module", "") for name in own]
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
