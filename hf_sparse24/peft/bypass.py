"""Refuses adapters that compute with the dense master weight of a sparse layer.

Most adapters add to what a layer returns, or change what it is given. Some read `base_layer.weight`, which is the dense
master: FRoD, HRA, SHiRA and SuperTuning replace the layer's GEMM by one of their own, so that nothing is sparse; HiRA
and PEANuT compute their term from it, so that outputs change when the model is unpatched. LoRA and DoRA act through the
mask instead, see `masked.py`.
"""

from torch import nn

from ..extensions import is_adapter
from ..weights.sparse_weight import sparse_weights
from ..weights.storage import layer_name

BYPASSING = {"frod", "hira", "hra", "ln_tuning", "peanut", "shira", "supertuning"}
"""PEFT's packages of adapters that read the weight of a linear `base_layer`, or never call that layer. A test tries all
that the installed PEFT has."""


def check_adapters(model: nn.Module) -> None:
    """Raise ValueError where an adapter computes with the dense weight of a sparse layer."""
    names = {layer_name(name) for name in sparse_weights(model)}
    for name, module in model.named_modules():
        if f"{name}.base_layer" in names and is_adapter(module) and bypasses_layer(module):
            adapter = f"{name}: this adapter ({type(module).__module__}.{type(module).__name__})"
            way = "call unpatch_model(model) before you add it, or use LoRA"
            raise ValueError(f"{adapter} computes with the layer's dense weight, not with its sparse one; {way}")


def bypasses_layer(adapter: nn.Module) -> bool:
    """Return whether an adapter reads the weight of its `base_layer`, or never calls that layer."""
    return not BYPASSING.isdisjoint(type(adapter).__module__.split("."))
