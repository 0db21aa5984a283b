"""The record of an adapter's base: written into its `adapter_config.json`, compared where the adapter is loaded.

An adapter means nothing without its base, and PEFT records only where the base was loaded from: a model that was
patched in memory comes from a dense checkpoint. So PEFT's `auto_mapping` of an adapter on sparse layers has a key
`sparse24`:

    config   the `Sparse24Config`, with its phase: a dense base is patched by it
    base     a sketch of the weights that sparse layers computed with when the adapter was added: whether that was the
             dense phase, the number of weights, and of at most `SAMPLE` of them the norm and `SKETCH` projections;
             and as `masters` a sketch of the dense weights that they were pruned from, where there are any

A hash would not do: in another dtype the same base has other bits. A projection of a weight W is p^T W q, where the
entries of p and q are -1 or 1, drawn with a fixed seed. The squared difference of two models' projections is, on
average, the squared distance of their weights (Achlioptas 2003): 0 for the same weights, about 1e-3 of their norm after
rounding to bf16. Where masks are computed anew, rounding has made ties, by which they differ: up to 0.07 of the norm;
those of another method are 0.2 or more away. Weights of dense layers are not in the sketch.

LoRA with masked layers is saved with a `peft_type` that PEFT knows by `register_tuners` alone, and raises as a KeyError
without this library: it would leave out the masks.
"""

import copy
import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from ..adapters.merging import adapters_in
from ..config import Sparse24Config
from ..methods import method_class
from ..methods.context import DENSE
from ..patching.packing import packed_config
from ..patching.surgery import patch_model, set_phase, unpatch_model
from ..run import patched_config
from ..weights.packed_weight import PackedWeight, packed_weights
from ..weights.sharding import whole
from ..weights.sparse_weight import SparseWeight, sparse_weights

ADAPTER_CONFIG = "adapter_config.json"
KEY = "sparse24"
SAMPLE = 16
SKETCH = 16
TOLERANCE = 0.02
"""Of the norm: rounding to bf16 moves weights by less, a hundred steps of training at usual rates by more."""
MASTERS_TOLERANCE, FLIPS_TOLERANCE = 0.005, 0.1
"""Dense masters that are as close as the first have only been rounded; pruned anew they are as close as the second."""
MASKED_TYPE = "LORA (import hf_sparse24, version 0.2 or later, before you load this adapter)"
"""The `peft_type` in the files of an adapter with masked layers."""


def record_origin(model: nn.Module, config: Any) -> None:
    """Let the `PeftConfig` of an adapter that is about to be added save which base it is for."""
    config.__dict__.pop("save_pretrained", None)  # of another model that it was used for
    sparse = _config_of(model)
    base = None if sparse is None else _recorded_base(model) or sketch(model, sparse.phase == DENSE)
    if sparse is None or base is None:
        return
    # PEFT overwrites `auto_mapping` while it saves, and a new config with one is not told from a loaded one.
    config.save_pretrained = functools.partial(_save_pretrained, config, type(model), sparse, base)


def record_masks(model: nn.Module, config: Any, adapter: str) -> bool:
    """Whether layers of an adapter that has been added act through a mask, which its config then saves."""
    has_record = "save_pretrained" in vars(config) and config.peft_type == "LORA"
    variants = [getattr(layer, "lora_variant", {}).get(adapter) for layer in adapters_in(model)]
    is_masked = has_record and any(getattr(variant, "is_masked", False) for variant in variants)
    if is_masked:
        config.save_pretrained = functools.partial(config.save_pretrained, is_masked=True)
    return is_masked


def record_late(model: nn.Module) -> None:
    """Let adapters that were there before the model was patched save the same."""
    for name, config in getattr(model, "peft_config", {}).items():
        if "save_pretrained" not in vars(config) and adapters_in(model):
            record_origin(model, config)
            record_masks(model, config, name)


def check_origin(model: nn.Module, config: Any) -> None:
    """Compare a model with the base that a loaded adapter was trained on; patch a dense model as the record says.

    ValueError: it has other sparse weights, or cannot be patched; it is left as it was.
    """
    record = (config.auto_mapping or {}).get(KEY)
    if record is None:
        return
    trained_on, is_dense = Sparse24Config.from_dict(record["config"]), _config_of(model) is None
    if is_dense:
        try:
            patch_model(model, trained_on)
        except ValueError as error:
            raise ValueError(f"the adapter is for a 2:4 base, which this model cannot be made: {error}") from error
    found = _recorded_base(model) or sketch(model, record["base"]["dense"])
    distance = 0.0 if found is None else _distance(record["base"], found)
    if found is None or distance <= _tolerance(record["base"], found):
        patched = patched_config(model)
        if patched is not None and trained_on.phase in method_class(patched.method).phases and not adapters_in(model):
            set_phase(model, trained_on.phase)
        return
    how = ""
    if is_dense:
        unpatch_model(model, sparse=False)
        how = f", patched as the adapter says (method={trained_on.method!r}),"
    away = "their number differs" if math.isinf(distance) else f"{distance:.0%} of their norm apart"
    raise ValueError(
        f"the adapter was trained on other sparse weights than this model{how} has ({away}): load the base that it was "
        f"trained on with hf_sparse24 imported, and the adapter onto it. {config.base_model_name_or_path!r} is where "
        f"that base came from; if it was patched or trained in memory since, save it by base.save_pretrained(directory)"
    )


def recorded_config(directory: str | Path) -> Any:
    """The `Sparse24Config` in the files of an adapter, as a dict; None where they have none."""
    path = Path(directory) / ADAPTER_CONFIG
    if not path.is_file():
        return None
    mapping = json.loads(path.read_text(encoding="utf-8")).get("auto_mapping") or {}
    return mapping.get(KEY, {}).get("config")


def _config_of(model: nn.Module) -> Sparse24Config | None:
    """The config of a patched or packed model, None for any other."""
    if packed_weights(model):
        config = getattr(getattr(model, "config", None), "quantization_config", None)
        return packed_config(config, None) if isinstance(config, Sparse24Config) else None
    return patched_config(model)


def _recorded_base(model: Any) -> dict[str, Any] | None:
    """The record of an adapter that the model has already: PiSSA or a merge may have changed its weights since."""
    saving = (vars(config).get("save_pretrained") for config in getattr(model, "peft_config", {}).values())
    return next((save.args[3] for save in saving if save is not None), None)


def _save_pretrained(
    config: Any,
    model_class: type,
    sparse: Sparse24Config,
    base: dict[str, Any],
    save_directory: str,
    auto_mapping_dict: dict[str, Any] | None = None,
    is_masked: bool = False,
    **kwargs: Any,
) -> None:
    """`PeftConfig.save_pretrained`, with the record: the base's config as it is when the adapter is saved."""
    record = {"config": sparse.to_dict(), "base": base}
    mapping = auto_mapping_dict or {"base_model_class": model_class.__name__, "parent_library": model_class.__module__}
    saved = copy.copy(config)
    if is_masked and sparse.phase != DENSE:
        saved.peft_type = MASKED_TYPE
    type(config).save_pretrained(saved, save_directory, auto_mapping_dict=mapping | {KEY: record}, **kwargs)


@torch.no_grad()
def sketch(model: nn.Module, dense: bool) -> dict[str, Any] | None:
    """The record's `base`, of the dense master weights or of the pruned ones; None where they have no values yet."""
    weights = _base_weights(model)
    if any((w.packed.values if isinstance(w, PackedWeight) else w.parameter).is_meta for w in weights):
        return None
    squares, projections = 0.0, torch.zeros(SKETCH, dtype=torch.float64)
    for index, weight in enumerate(weights[:: math.ceil(len(weights) / SAMPLE)]):
        matrix = _value(weight, dense).flatten(0, -2).float()
        squares += float(matrix.norm()) ** 2
        left, right = _signs(index, len(matrix), matrix), _signs(-1 - index, matrix.shape[1], matrix)
        projections += (left * (matrix @ right)).double().sum(0).cpu()
    found = {"dense": dense, "weights": len(weights), "norm": math.sqrt(squares), "sketch": projections.tolist()}
    return found if dense or not sparse_weights(model) else found | {"masters": sketch(model, True)}


def _signs(seed: int, size: int, like: Tensor) -> Tensor:
    """`[size, SKETCH]` of -1 and 1, the same on every machine: NumPy guarantees that for `RandomState`."""
    signs = numpy.random.RandomState(seed % 2**32).randint(0, 2, (size, SKETCH), dtype=numpy.int8)
    return torch.from_numpy(signs).to(like.device, like.dtype) * 2 - 1


def _distance(recorded: dict[str, Any], found: dict[str, Any]) -> float:
    """The distance of two models' weights over their norm, inf where their numbers of weights differ."""
    if recorded["weights"] != found["weights"]:
        return math.inf
    return math.dist(recorded["sketch"], found["sketch"]) / math.sqrt(SKETCH) / max(recorded["norm"], 1e-30)


def _tolerance(recorded: dict[str, Any], found: dict[str, Any]) -> float:
    """How far apart two bases may be that are the same: masks of rounded weights may differ from the recorded ones."""
    one, other = recorded.get("masters"), found.get("masters")
    return FLIPS_TOLERANCE if one and other and _distance(one, other) <= MASTERS_TOLERANCE else TOLERANCE


def _value(weight: SparseWeight | PackedWeight, dense: bool) -> Tensor:
    if isinstance(weight, PackedWeight):
        return weight.dense()
    return whole(weight.parameter) if dense else weight.pruned()


def _base_weights(model: nn.Module) -> list[SparseWeight | PackedWeight]:
    """The sparse and packed weights, without the copies that adapters train."""
    weights = sparse_weights(model) | packed_weights(model)
    return [weight for name, weight in weights.items() if ".modules_to_save." not in name]
