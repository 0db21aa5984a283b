"""Which sparse weights an adapter was trained on: recorded in its `adapter_config.json`, compared when it is loaded.

An adapter means nothing without its base, and a sparse base is not always where PEFT looks for it: a model that was
patched in memory comes from a checkpoint that is dense. So, of adapters that a tuner puts into layers (not of prompts),
PEFT's `auto_mapping`, which describes the base model, has a key `sparse24` as well:

    config   the `Sparse24Config`, with the phase, by which a dense base is patched
    base     a fingerprint of the weights that sparse layers computed with when the adapter was added: whether that was
             in the dense phase, their number, and of `SAMPLE` of them the norm and `SKETCH` random projections

A projection of a weight W is p^T W q with entries of p and q drawn from {-1, 1}, and the same every time. The squared
difference of two models' projections is, on average, the squared distance of their weights (Johnson-Lindenstrauss, by
signs: Achlioptas 2003). So the distance is known without the weights: it is 0 for the same ones, some 1e-3 of the norm
for those of another dtype, and of the order of the norm for other masks or other scales. Dense weights are not in it:
where they were changed in memory, nothing says so.
"""

import functools
import json
import math
from pathlib import Path
from typing import Any

import numpy
import torch
from sparse24_kernels.masks import count_flips
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..adapters.merging import adapters_in
from ..config import Sparse24Config
from ..methods import method_class, takes_masks
from ..patching.surgery import patch_model, set_phase, unpatch_model
from ..progress import get_logger
from ..run import patched_config
from ..weights.packed_weight import PackedWeight, packed_weights
from ..weights.sparse_weight import SparseWeight, sparse_weights

logger = get_logger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
KEY = "sparse24"
SAMPLE = 16
SKETCH = 16
TOLERANCE = 0.02
"""Of the norm: more than rounding to bf16 changes, less than a hundred steps of training do."""


def record_origin(model: nn.Module, config: Any) -> None:
    """Let the `PeftConfig` of an adapter that is about to be added write down which base it is for."""
    config.__dict__.pop("save_pretrained", None)  # of another model that it was used for
    sparse = _config_of(model)
    if sparse is None:
        return
    base = _known_base(model) or fingerprint(model, sparse.phase == "dense")
    if base is None:
        return
    # PEFT overwrites `auto_mapping` while it saves, and a new config with one is not told from a loaded one.
    config.save_pretrained = functools.partial(_save_pretrained, config, type(model), sparse=sparse, base=base)
    if not _may_be_rebuilt(model):
        logger.warning(
            f"this adapter's base was pruned in memory, and its masks cannot be found again in "
            f"{model.name_or_path!r}: save the base as well (model.save_pretrained(directory)), and load the adapter "
            f"onto from_pretrained(directory)"
        )


def check_origin(model: nn.Module, config: Any) -> None:
    """Compare a model with the base that a loaded adapter was trained on; patch a dense one as the record says.

    Raises:
        ValueError: it has other sparse weights, or cannot be patched; it is left as it was.
    """
    record = (config.auto_mapping or {}).get(KEY)
    if record is None:
        return
    trained_on = Sparse24Config.from_dict(record["config"])
    current = _config_of(model)
    if current is None:
        try:
            patch_model(model, trained_on)
        except ValueError as error:
            raise ValueError(f"the adapter is for a 2:4 base, which this model cannot be made: {error}") from error
    found = _known_base(model) or fingerprint(model, record["base"]["dense"])
    distance = 0.0 if found is None else _distance(record["base"], found)
    if distance <= TOLERANCE:
        patched = patched_config(model)
        if patched is not None and trained_on.phase in method_class(patched.method).phases and not adapters_in(model):
            set_phase(model, trained_on.phase)
        return
    if current is None:
        unpatch_model(model, sparse=False)
    away = "their number differs" if math.isinf(distance) else f"{distance:.0%} of their norm apart"
    how = "" if current is not None else f", patched as the adapter says (method={trained_on.method!r}),"
    raise ValueError(
        f"the adapter was trained on other sparse weights than this model{how} has ({away}): load the base that it was "
        f"trained on with hf_sparse24 imported, and the adapter onto it. {config.base_model_name_or_path!r} is where "
        f"that base came from; if it was patched or trained in memory since, save it by base.save_pretrained(directory)"
    )


def _config_of(model: nn.Module) -> Sparse24Config | None:
    """The config of a patched or a packed model, None of any other."""
    if packed_weights(model):
        config = getattr(getattr(model, "config", None), "quantization_config", None)
        return config.replace() if isinstance(config, Sparse24Config) else None
    return patched_config(model)


def recorded_config(directory: str | Path) -> Any:
    """The `Sparse24Config` that the files of an adapter name, as a dict of JSON's; None where they name none."""
    path = Path(directory) / ADAPTER_CONFIG
    if not path.is_file():
        return None
    mapping = json.loads(path.read_text(encoding="utf-8")).get("auto_mapping") or {}
    return mapping.get(KEY, {}).get("config")


def _known_base(model: Any) -> dict[str, Any] | None:
    """The `base` of an adapter that the model has already: since it was added, PiSSA or a merge may have changed it."""
    added = (vars(config).get("save_pretrained") for config in getattr(model, "peft_config", {}).values())
    return next((save.keywords["base"] for save in added if save is not None), None)


def _save_pretrained(
    config: Any,
    model_class: type,
    save_directory: str,
    auto_mapping_dict: dict[str, Any] | None = None,
    *,
    sparse: Sparse24Config,
    base: dict[str, Any],
    **kwargs: Any,
) -> None:
    """`PeftConfig.save_pretrained`, with the record."""
    mapping = auto_mapping_dict or {"base_model_class": model_class.__name__, "parent_library": model_class.__module__}
    record = {KEY: {"config": sparse.to_dict(), "base": base}}
    type(config).save_pretrained(config, save_directory, auto_mapping_dict=mapping | record, **kwargs)


@torch.no_grad()
def fingerprint(model: nn.Module, dense: bool) -> dict[str, Any] | None:
    """The record's `base`, of the dense master weights or of the pruned ones; None where they have no values yet."""
    weights = _base_weights(model)
    if any((w.packed.values if isinstance(w, PackedWeight) else w.parameter).is_meta for w in weights):
        return None
    squares, sketch = 0.0, torch.zeros(SKETCH, dtype=torch.float64)
    for index, weight in enumerate(weights[:: math.ceil(len(weights) / SAMPLE)]):
        matrix = _value(weight, dense).flatten(0, -2).float()
        squares += float(matrix.norm()) ** 2
        left, right = _signs(index, len(matrix), matrix), _signs(-1 - index, matrix.shape[1], matrix)
        sketch += (left * (matrix @ right)).double().sum(0).cpu()
    return {"dense": dense, "weights": len(weights), "norm": math.sqrt(squares), "sketch": sketch.tolist()}


def _signs(seed: int, size: int, like: Tensor) -> Tensor:
    """`[size, SKETCH]` of -1 and 1, the same on every machine: NumPy promises that of `RandomState`."""
    signs = numpy.random.RandomState(seed % 2**32).randint(0, 2, (size, SKETCH), dtype=numpy.int8)
    return torch.from_numpy(signs).to(like.device, like.dtype) * 2 - 1


def _distance(recorded: dict[str, Any], found: dict[str, Any]) -> float:
    """How far the weights are apart, over their norm."""
    if recorded["weights"] != found["weights"]:
        return math.inf
    pairs = zip(recorded["sketch"], found["sketch"])
    return math.sqrt(sum((a - b) ** 2 for a, b in pairs) / SKETCH) / max(recorded["norm"], 1e-30)


def _value(weight: SparseWeight | PackedWeight, dense: bool) -> Tensor:
    if isinstance(weight, PackedWeight):
        return weight.dense()
    return weight.parameter if dense else weight.pruned()


def _base_weights(model: nn.Module) -> list[SparseWeight | PackedWeight]:
    """Without the copies that adapters train."""
    weights = sparse_weights(model) | packed_weights(model)
    return [weight for name, weight in weights.items() if ".modules_to_save." not in name]


def _may_be_rebuilt(model: Any) -> bool:
    """Whether `patch_model` may find the masks that the model has in the checkpoint that it came from.

    Masks that `oneshot` has chosen are not those of magnitude, or its weights are zero where the masks are.
    """
    weights = [weight for weight in _base_weights(model) if isinstance(weight, SparseWeight)]
    if not weights:
        return True  # a packed model comes from a checkpoint that has its weights
    method: Any = weights[0].method
    if not takes_masks(type(method)) or _is_sparse_checkpoint(getattr(model, "name_or_path", "")):
        return True
    if all(torch.equal(weight.pruned(), weight.parameter) for weight in weights):
        return False
    before = [weight.mask(packed=True) for weight in weights]
    fresh = [weight.fresh_mask(weight.parameter) for weight in weights]
    flips = sum(int(count) for count in count_flips(before, fresh))
    return flips <= TOLERANCE * sum(weight.parameter.numel() for weight in weights)  # another dtype breaks ties anew


def _is_sparse_checkpoint(name: str) -> bool:
    """Whether the checkpoint on disk, or in the Hub's cache, is one of a sparse model."""
    try:
        saved, _ = PreTrainedConfig.get_config_dict(name, local_files_only=True)
    except (OSError, ValueError):
        return False
    return (saved.get("quantization_config") or {}).get("quant_method") == Sparse24Config.quant_method
