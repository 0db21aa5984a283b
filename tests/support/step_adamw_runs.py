"""StepAdamW on a few parameters and made-up gradients."""

import torch
from torch import nn

from hf_sparse24.methods import StepAdamW

WEIGHTS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
PAPER = {"switch_rule": "arithmetic", "update_clip": 0.0}


def parameters(seed: int = 0, dtype=torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((4, 8), (8, 4), (6,))]


def make(params: list[nn.Parameter], **overrides) -> StepAdamW:
    """Two masked matrices in groups of their own, and a vector that is not."""
    groups = [
        {"params": [params[0]], "masked": True},
        {"params": [params[1]], "masked": True, "weight_decay": 0.0},
        {"params": [params[2]], "lr": 3e-3},
    ]
    return StepAdamW(groups, **{**WEIGHTS, **PAPER, "total_steps": 20, "switch_by": 8, **overrides})


def set_gradients(params: list[nn.Parameter], step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in params:
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * scale).to(parameter.dtype)


def train(optimizer, params, steps, scale: float = 1.0) -> None:
    for step in steps:
        set_gradients(params, step, scale)
        optimizer.step()
