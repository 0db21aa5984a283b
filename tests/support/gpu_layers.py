"""Layers that the tests of sparse GEMMs build: the same weights and random numbers each time."""

import torch
from torch import nn

from hf_sparse24 import Sparse24Config, patch_model, sparse_weights
from recipes.benchmarks.cases import BF16, draw

METHODS = ("s-ste", "t-sr-ste")


def linear(inputs: int, out: int, bias: bool, device: torch.device, dtype: torch.dtype = BF16) -> nn.Linear:
    layer = nn.Linear(inputs, out, bias, device, dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(draw(device, tuple(parameter.shape), dtype) / inputs**0.5)
    return layer


def patched(layer: nn.Module, method: str, backend: str) -> nn.Module:
    """The layer made sparse, with MVUE's random numbers fixed."""
    parent = nn.ModuleList([layer])
    patch_model(parent, Sparse24Config(method=method, target_modules="all-linear", backend=backend))
    for weight in sparse_weights(parent).values():
        weight.rng_key = torch.tensor(7, device=weight.parameter.device)
    return parent[0]
