"""Refuses adapters that compute with the dense master weight of a sparse layer.

Most adapters add to what a layer returns, or change what it is given. Some read `base_layer.weight`, which is the dense
master: FRoD, HRA, SHiRA and SuperTuning replace the layer's GEMM by one of their own, so that nothing is sparse; HiRA
and PEANuT compute their term from it, so that outputs change when the model is unpatched. DoRA does too. LoRA acts
through the mask instead, see `masked.py`.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..extensions import is_adapter
from ..weights.input_dim import input_dim_of
from ..weights.sparse_weight import sparse_weights
from ..weights.storage import layer_name


def check_adapters(model: nn.Module) -> None:
    """Raise ValueError where an adapter, active or not, computes with the dense weight of a sparse layer."""
    names = {layer_name(name) for name in sparse_weights(model)}
    kinds = set()
    for name, module in model.named_modules():
        if f"{name}.base_layer" not in names or not is_adapter(module):
            continue
        for own in module._get_available_adapters():
            kind = type(module), own  # one of each: all layers are adapted alike
            is_masked = getattr(getattr(module, "lora_variant", {}).get(own), "is_masked", False)
            if not is_masked and kind not in kinds and bypasses_layer(module, own):
                adapter = f"{name}: this adapter ({type(module).__module__}.{type(module).__name__})"
                way = "call unpatch_model(model) before you add it, or use LoRA"
                raise ValueError(f"{adapter} computes with the layer's dense weight, not with its sparse one; {way}")
            kinds.add(kind)


@torch.no_grad()
def bypasses_layer(adapter: nn.Module, name: str) -> bool:
    """Return whether the adapter `name` reads the weight of its `base_layer`, or never calls it: found by a probe."""
    layer: Any = adapter.base_layer
    if layer.weight.is_meta:
        return False
    probe = _Probe(layer)
    try:
        x = layer.weight.new_zeros(1, 1, probe.in_features)
        unread = {id(p): torch.zeros_like(p, device=x.device) for p in adapter.parameters() if p.is_meta}
        copied: Any = copy.deepcopy(adapter, {id(layer): probe} | unread)
        copied._active_adapter = [name]
        output = copied(x)
    except Exception:  # such as an adapter that needs more arguments: nothing is known
        return False
    return not probe.was_called or bool(output.isnan().any())


class _Probe(nn.Module):
    def __init__(self, layer: Any):
        super().__init__()
        weight = layer.weight
        self.in_features, self.out_features = weight.shape[::-1] if input_dim_of(layer) == -1 else weight.shape
        # No Parameters: with low_cpu_mem_usage PEFT makes all new ones on the meta device.
        self.weight = weight.new_tensor(torch.nan).expand(weight.shape)
        self.bias = None if layer.bias is None else torch.zeros_like(layer.bias)
        self.was_called = False

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.was_called = True
        return x.new_zeros(*x.shape[:-1], self.out_features)
