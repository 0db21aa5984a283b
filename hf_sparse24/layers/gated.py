"""fuse_gated_mlps: let gated MLPs compute `act(gate) * up` in one operation that follows the memory layout."""

import copy
import inspect
from functools import partial
from itertools import product
from typing import Any

import sparse24_kernels as kernels
import torch
from sparse24_kernels.gated import GATED_ACTIVATIONS
from torch import Tensor, nn

from .sparse_module import Made, change_class, made_class

LAYOUTS = (
    ("gate_proj", "up_proj", "down_proj"),  # Llama, Mistral, Qwen, Gemma, OLMo and most others
    ("gate_up_proj", "down_proj"),  # Phi-3, GLM
    ("w1", "w3", "w2"),  # LFM2
    ("Wi", "Wo"),  # ModernBERT
)
"""Names of the linear layers of gated MLPs: two inputs, or one whose output is cut into halves, and the output."""


def fuse_gated_mlps(model: nn.Module) -> list[str]:
    """Make the gated MLPs of `model` compute with `sparse24_kernels.gated_activation`, in place.

    A fused MLP rounds once instead of twice, and saves two tensors for the backward pass instead of three. Parameters,
    submodules and `state_dict` stay the same; a saved model that is loaded is not fused. It may be patched before or
    after.

    A module is fused if its linear layers have the names that Llama (`gate_proj`, `up_proj`, `down_proj`), Phi-3
    (`gate_up_proj`, `down_proj`), LFM2 (`w1`, `w3`, `w2`) or ModernBERT (`Wi`, `Wo`) gives them, if it has no other
    weights, and if its own forward computes `output(act(gate) * up)`, with one of `GATED_ACTIVATIONS` of
    `sparse24_kernels.gated`, on tiny layers in train mode. All others, such as an MLP with dropout, stay as they are.

    Args:
        model: any model, patched or not, on any device, meta included.

    Returns:
        Names of all fused modules, in module order. Fusing again changes nothing.

    Examples:
        >>> from transformers import AutoModelForCausalLM
        >>> model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B")
        >>> fuse_gated_mlps(model)[0]
        'model.layers.0.mlp'
    """
    fused = []
    for name, module in model.named_modules():
        if not isinstance(module, FusedGatedMLP) and (fused_class := _find_fused_class(module)):
            change_class(module, fused_class)
        if isinstance(module, FusedGatedMLP):
            fused.append(name)
    return fused


class FusedGatedMLP(Made):
    """First base of the classes of fused modules: one for each own class, layout, order and kind."""

    prefix = "Fused"

    def forward(self: Any, *args: Tensor, **kwargs: Tensor) -> Tensor:
        (x,) = *args, *kwargs.values()  # the one argument, by the name that the module itself gives it
        return _fused_forward(self, x, *self.made_of[2])


def _fused_forward(module: nn.Module, x: Tensor, layout: tuple[str, ...], up_first: bool, kind: str) -> Tensor:
    outputs = [getattr(module, name)(x) for name in layout[:-1]]
    first, second = outputs if len(outputs) == 2 else outputs[0].chunk(2, dim=-1)
    gate, up = (second, first) if up_first else (first, second)
    return getattr(module, layout[-1])(kernels.gated_activation(gate, up, kind))


def _find_fused_class(module: nn.Module) -> type[nn.Module] | None:
    own_class: type = type(module)
    layouts = (layout for layout in LAYOUTS if _is_simple(module, layout))
    keys = product(layouts, (False, True), GATED_ACTIVATIONS)
    key = next((key for key in keys if _behaves_like(module, *key)), None)
    return None if key is None else made_class(FusedGatedMLP, own_class, key)


def _is_simple(module: nn.Module, layout: tuple[str, ...]) -> bool:
    """Whether it has the layout's linear layers, and a fused forward leaves out nothing of the module."""
    linears = set(layout)
    if not linears <= module._modules.keys() or module._parameters or module._buffers:
        return False
    if "forward" in vars(module) or len(inspect.signature(module.forward).parameters) != 1:  # the first: replaced
        return False
    others = [child for name, child in module.named_children() if name not in linears]
    return not any(
        child._forward_hooks or child._forward_pre_hooks or [*child.parameters(), *child.buffers()] for child in others
    )


def _behaves_like(module: nn.Module, layout: tuple[str, ...], up_first: bool, kind: str) -> bool:
    """Whether the module's forward equals the fused one, on tiny random layers in float64."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        width = 2 if len(layout) == 2 else 1
        linear = partial(nn.Linear, dtype=torch.float64, device="cpu")
        linears = {name: linear(8, 16 * width) for name in layout[:-1]} | {layout[-1]: linear(16, 8)}
        probe = copy.copy(module)
        others = {name: copy.deepcopy(child) for name, child in module._modules.items() if name not in linears}
        probe.__dict__["_modules"] = others | linears
        probe.train()  # so that dropout shows
        x = 3 * torch.randn(2, 3, 8, dtype=torch.float64, device="cpu")
        x = torch.cat([x, 1e3 * x])  # so that what clamps large values shows
        try:
            own = probe.forward(x)
            return torch.allclose(own, _fused_forward(probe, x, layout, up_first, kind), rtol=1e-6, atol=1e-6)
        except Exception:  # whatever a foreign forward raises, it is none that we know
            return False
