"""LoRA around sparse layers, as PEFT's own `LoraVariant`. Imports PEFT.

PEFT's layers are `Any` here: no type describes their attributes, dicts of modules by the adapter's name.
"""

from typing import Any

import torch
from peft.tuners.lora import variants
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraVariant
from torch import Tensor

from .masked import has_mask, masked_delta, masked_linear, out_in
from .merging import UNMERGED


class MaskedLora(LoraVariant):
    """LoRA through the mask: Z = X Ws^T + X (M * s B A)^T; plain LoRA in a method's dense phase.

    As in PEFT, dropout acts on the inputs of the adapter alone.
    """

    is_masked = True

    @staticmethod
    def init(module: Any, adapter_name: str, **kwargs: Any) -> None:
        """Make nothing: PEFT has made the parameters."""

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
        layer, bias = module.get_base_layer(), module.lora_B[active_adapter].bias
        x = module.lora_dropout[active_adapter](x)
        a, b, scaling = _factors(module, active_adapter)
        if not has_mask(layer):
            output = module.lora_B[active_adapter](module.lora_A[active_adapter](x)) * scaling
            return result + output.to(result.dtype)
        output = masked_linear(x.to(result.dtype), a, b, scaling, layer)
        return result + (output if bias is None else output + (bias * scaling).to(result.dtype))

    @staticmethod
    def merge_safe(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        layer = module.get_base_layer()
        own = out_in(layer, layer.weight.detach())
        unmerged = getattr(module, UNMERGED).weight() if module.merged_adapters else own  # before any merge
        mask = unmerged if has_mask(layer) else torch.ones_like(unmerged)
        merged = out_in(layer, orig_weight.data) + masked_delta(mask, *_factors(module, active_adapter))
        return out_in(layer, merged.to(orig_weight.dtype)).contiguous()

    @classmethod
    def merge_unsafe(cls, module: Any, active_adapter: str, orig_weight: Tensor) -> None:
        orig_weight.data = cls.merge_safe(module, active_adapter, orig_weight)

    @staticmethod
    def unmerge(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return orig_weight.data  # `merging` restores the weight


MASKED = {None, getattr(variants, "MiCALinearVariant", None)}
"""PEFT's variants that act through the mask: plain LoRA, and LoRA with B frozen, which older PEFT lacks. Others compute
more than a change of the weight, or a dense one, as DoRA does."""


def mask_adapter(adapter: Any, name: str) -> bool:
    """Let a layer's adapter act through the mask of the base layer, and return whether its kind can."""
    if not isinstance(adapter, LoraLinear) or name not in adapter.lora_A:
        return False
    current = adapter.lora_variant.get(name)
    if (None if current is None else type(current)) in MASKED:
        adapter.lora_variant[name] = MaskedLora()
    return isinstance(adapter.lora_variant.get(name), MaskedLora)


def _factors(module: Any, adapter: str) -> tuple[Tensor, Tensor, float]:
    return module.lora_A[adapter].weight, module.lora_B[adapter].weight, module.scaling[adapter]
