"""What tests of adapters share: small sparse models, LoRA around their MLPs, and what these compute."""

from typing import Any

import pytest
import sparse_models
import torch
from torch import nn

peft = pytest.importorskip("peft")

TARGETS = {"llama": ["up_proj", "down_proj"], "gpt2": ["c_fc", "mlp.c_proj"]}
EXPECTED_WARNINGS = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # PEFT asks for it
    pytest.mark.filterwarnings("ignore:Unable to fetch remote file"),  # PEFT looks for the base's vocabulary
    pytest.mark.filterwarnings("ignore:Could not find a config file"),
]
ONE_BLOCK = {"llama": {"num_hidden_layers": 1}, "gpt2": {"n_layer": 1}}


def patched(
    base: str = "llama", method: str = "s-ste", dtype: torch.dtype = torch.float32, **settings: Any
) -> nn.Module:
    """A model of one block in eval mode, its MLP sparse."""
    return sparse_models.patched(base, ONE_BLOCK[base], method=method, **settings).to(dtype).eval()


def lora(base: str = "llama", **changes: Any) -> "peft.LoraConfig":
    """One whose adapter does something from the start, unless `init_lora_weights` is given."""
    defaults = {"r": 4, "lora_alpha": 16, "target_modules": TARGETS[base], "init_lora_weights": False}
    return peft.LoraConfig(**({"task_type": "CAUSAL_LM", "fan_in_fan_out": base == "gpt2"} | defaults | changes))


def adapted(
    base: str = "llama", method: str = "s-ste", dtype: torch.dtype = torch.float32, **changes: Any
) -> nn.Module:
    """`patched(base, method, dtype)` with the adapter of `lora(base, **changes)`, in eval mode."""
    torch.manual_seed(1)
    return peft.get_peft_model(patched(base, method, dtype), lora(base, **changes)).eval()


def around(model: nn.Module) -> list[nn.Module]:
    """The adapters around sparse layers."""
    return [m for m in model.modules() if hasattr(m, "lora_A") and hasattr(m.get_base_layer(), "sparse24")]


def masks(model: nn.Module) -> list[bool]:
    """Of every LoRA layer around an MLP layer, whether it acts through the mask."""
    found = [m for name, m in model.named_modules() if hasattr(m, "lora_variant") and ".mlp." in name]
    return [getattr(variant, "is_masked", False) for m in found for variant in m.lora_variant.values() or [None]]


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def logits(model: nn.Module, **inputs: Any) -> torch.Tensor:
    """Of any model in fp32, so that comparisons have the tolerance of fp32."""
    return sparse_models.logits(model, **inputs).float()
