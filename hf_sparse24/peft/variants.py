"""LoRA and DoRA around sparse layers, as PEFT's own `LoraVariant`s. Imports PEFT.

PEFT's layers are `Any` here: no type describes their attributes, dicts of modules by the adapter's name.
"""

from typing import Any

import torch
from peft.tuners.lora import variants
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraVariant
from peft.tuners.lora.variants import DoraLinearVariant
from torch import Tensor, nn

from .masked import has_mask, masked_delta, masked_linear, out_in, row_norms, unmerged_weight


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
        x = module.lora_dropout[active_adapter](x)
        return result + _output(module, active_adapter, x, result.dtype)

    @staticmethod
    def merge_safe(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        layer = module.get_base_layer()
        merged = out_in(layer, orig_weight.data) + _delta(module, active_adapter, unmerged_weight(module))
        return out_in(layer, merged.to(orig_weight.dtype)).contiguous()

    @classmethod
    def merge_unsafe(cls, module: Any, active_adapter: str, orig_weight: Tensor) -> None:
        orig_weight.data = cls.merge_safe(module, active_adapter, orig_weight)

    @staticmethod
    def unmerge(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        return orig_weight.data  # `merging` restores the weight


class MaskedDora(MaskedLora, DoraLinearVariant):
    """DoRA through the mask: rows of Ws + M * s B A, each scaled to the length that its magnitude says.

    As in PEFT, and in DoRA's section 4.3 (arXiv 2402.09353), the length of a row is a constant to autograd, and an
    adapter scales what the adapters before it have made.
    """

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
        layer, dropout = module.get_base_layer(), module.lora_dropout[active_adapter]
        base = result
        if module.training and not isinstance(dropout, nn.Identity):
            x = dropout(x)
            base = layer(x.to(result.dtype))
        if layer.bias is not None:
            base = base - layer.bias
        norms = row_norms(*_factors(module, active_adapter), layer)
        scale = module.lora_magnitude_vector[active_adapter].weight / norms
        delta = _output(module, active_adapter, x, result.dtype)
        return result + ((scale - 1) * base + scale * delta).to(result.dtype)

    @staticmethod
    def merge_safe(module: Any, active_adapter: str, orig_weight: Tensor) -> Tensor:
        layer, unmerged = module.get_base_layer(), unmerged_weight(module)
        delta = _delta(module, active_adapter, unmerged)
        norms = (unmerged + delta).norm(dim=1, keepdim=True)
        scale = module.lora_magnitude_vector[active_adapter].weight[:, None] / norms
        merged = scale * (out_in(layer, orig_weight.data) + delta)
        return out_in(layer, merged.to(orig_weight.dtype)).contiguous()


MASKED: dict[type | None, type[LoraVariant]] = {
    None: MaskedLora,
    DoraLinearVariant: MaskedDora,
    getattr(variants, "MiCALinearVariant", None): MaskedLora,  # LoRA with B frozen; older PEFT has none
}
"""By PEFT's variant. Its others compute more than a change of the weight, or a dense one."""


def mask_adapter(adapter: Any, name: str) -> bool:
    """Let a layer's adapter act through the mask of the base layer, and return whether its kind can."""
    if not isinstance(adapter, LoraLinear) or name not in adapter.lora_A:
        return False
    current = adapter.lora_variant.get(name)
    variant = MASKED.get(None if current is None else type(current))
    if variant is not None:
        adapter.lora_variant[name] = variant()
    return isinstance(adapter.lora_variant.get(name), MaskedLora)


@torch.no_grad()
def init_magnitude(adapter: Any, name: str) -> None:
    """Set a new DoRA adapter's magnitude to the lengths of its masked rows; PEFT has measured them without the mask."""
    if name in adapter.lora_magnitude_vector:
        factors, layer = _factors(adapter, name), adapter.get_base_layer()
        if not factors[0].is_meta:
            adapter.lora_magnitude_vector[name].weight.copy_(row_norms(*factors, layer))


def _factors(module: Any, adapter: str) -> tuple[Tensor, Tensor, float]:
    return module.lora_A[adapter].weight, module.lora_B[adapter].weight, module.scaling[adapter]


def _output(module: Any, adapter: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what an adapter adds to the base layer's output, in `dtype`."""
    layer, bias = module.get_base_layer(), module.lora_B[adapter].bias
    a, b, scaling = _factors(module, adapter)
    if not has_mask(layer):
        return (module.lora_B[adapter](module.lora_A[adapter](x)) * scaling).to(dtype)
    output = masked_linear(x.to(dtype), a, b, scaling, layer)
    return output if bias is None else output + (bias * scaling).to(dtype)


def _delta(module: Any, adapter: str, unmerged: Tensor) -> Tensor:
    """Return what an adapter adds to the weight `[out, in]`, in fp32 or fp64."""
    mask = unmerged if has_mask(module.get_base_layer()) else torch.ones_like(unmerged)
    return masked_delta(mask, *_factors(module, adapter))
