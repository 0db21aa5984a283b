"""Models that cannot be patched or unpatched as they are, each refused by an error that says what to do."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers.integrations import is_deepspeed_zero3_enabled

from ..config import SavedConfig
from ..metrics import all_finite
from ..weights.sharding import local, total
from ..weights.sparse_weight import SparseWeight

# Wrappers that hold on to a model's parameters or code, by class name so that nothing need be imported.
_WRAPPERS = {
    "OptimizedModule": "torch.compile",
    "FullyShardedDataParallel": "FSDP1, which flattens weights (take FSDP2, fully_shard)",
    "FSDPModule": "FSDP2 (fully_shard)",
    "DistributedDataParallel": "DDP",
    "DataParallel": "DataParallel",
    "DeepSpeedEngine": "DeepSpeed",
}


def check_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={model!r}: must be a torch.nn.Module, such as a model of Transformers; load it first")


def check_trainable(weights: Mapping[str, SparseWeight]) -> None:
    """Raise ValueError where a model with these sparse weights, or none, cannot be trained by a config."""
    if is_deepspeed_zero3_enabled():
        way = "set zero_optimization.stage (accelerate's zero_stage) to 1 or 2, or use FSDP2"
        raise ValueError(f"DeepSpeed is set to ZeRO-3, which keeps weights as flat pieces: {way}")
    if any(weight.run is not None and not weight.storage.has_zeros for weight in weights.values()):
        way = "leave out patch_model, and sparse24_config of a Sparse24Trainer; unpatch_model(model) makes it dense"
        raise ValueError(f"the model trains its kept values alone already (config.master): {way}")


def reject_wrapped(model: nn.Module) -> None:
    for module in model.modules():
        for cls in type(module).__mro__:
            name = cls.__name__ if module._compiled_call_impl is None else "OptimizedModule"
            if name in _WRAPPERS:
                raise ValueError(f"{_WRAPPERS[name]} holds on to this model already: patch or unpatch it before")


def reject_quantized(model: nn.Module) -> None:
    quantization = getattr(getattr(model, "config", None), "quantization_config", None)
    if quantization is None:
        return
    is_dict = isinstance(quantization, dict)
    method = quantization.get("quant_method") if is_dict else getattr(quantization, "quant_method", None)
    if isinstance(quantization, SavedConfig) and quantization.facts.packed is not None:
        raise ValueError("the model is packed, and has no weights to train; call unpack_model(model) first")
    if method != "sparse24":
        name = getattr(method, "value", method)  # of an enum, or as config.json has it
        raise ValueError(f"the model is quantized with {name}; load it without quantization to make it sparse")


def reject_non_finite(weights: Iterable[tuple[str, Tensor]], advice: str = "nothing was changed") -> None:
    """Raise ValueError where a named weight has NaN or inf; its text ends with `advice`."""
    found = {name: weight for name, weight in weights if not weight.is_meta and weight.is_floating_point()}
    counts = [1 - all_finite(local(weight)).int() for weight in found.values()]
    bad = [name for name, count in zip(found, total(counts, list(found.values()))) if count] if found else []
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise ValueError(f"NaN or inf in the weights of {', '.join(bad[:5])}{more}; {advice}")
