"""What tests of oneshot share: data, a model of one layer, and that a model is as it was."""

import torch
import zoo
from sparse_models import assert_same_state
from torch import nn

from hf_sparse24 import Sparse24Config, sparse_weights


def fixed_mask(**arguments) -> Sparse24Config:
    return Sparse24Config(method="fixed-mask", **{"target_modules": "all-linear", **arguments})


def batches(count: int = 3) -> list[dict[str, torch.Tensor]]:
    return [zoo.batch(seed=seed, rows=4, length=24) for seed in range(count)]


LAYERWISE = {"reconstruct": "layer"}
"""Arguments of `oneshot` with which each layer's result depends on its own problem alone."""


def correlated(tokens: int, inputs: int, seed: int = 0, mean: float = 0.0) -> torch.Tensor:
    """Activations as layers see them: a few directions and a few inputs dominate. fp64."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    noise = randn(tokens, inputs)
    return (randn(tokens, 6) @ randn(6, inputs) + 0.5 * noise) * randn(inputs).exp() + mean


class OneLayer(nn.Module):
    """A "model" of one block that holds one layer; its batches are the layer's inputs."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"mlp": layer})])

    @property
    def layer(self):
        return self.blocks[0]["mlp"]

    def forward(self, x, attention_mask=None):
        return self.layer(x)


def assert_untouched(model: nn.Module, before: dict[str, torch.Tensor], mode: bool = True) -> None:
    assert_same_state(model, before)
    assert not sparse_weights(model) and all(module.training == mode for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert getattr(getattr(model, "config", None), "quantization_config", None) is None
