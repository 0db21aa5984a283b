"""Layers whose GEMMs run sparse on a CPU: the results and gradients of dense math, eager and compiled."""

import pytest
import torch
from sparse24_kernels.cpu.library import load
from sparse24_kernels.gemm import cpu_kernels
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_sparse24 import Sparse24Config, patch_model
from hf_sparse24.weights.sparse_weight import sparse_weights

pytestmark = pytest.mark.skipif(isinstance(load(), str), reason="no kernels for this CPU")
LAYERS = {"Linear": lambda: nn.Linear(96, 64), "Conv1D": lambda: Conv1D(64, 96)}


class Model(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


def made(kind, backend, **config):
    torch.manual_seed(0)
    model = Model(LAYERS[kind]())
    patch_model(model, Sparse24Config(target_modules=["layer"], backend=backend, **config))
    for weight in sparse_weights(model).values():
        weight.rng_key = torch.tensor(7)  # of MVUE
    return model


def gradients(model, run):
    torch.manual_seed(1)
    x = torch.randn(2, 48, 96, requires_grad=True)
    result = run(x)
    (result * torch.randn(2, 48, 64)).sum().backward()
    return [result, x.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("method", ["s-ste", "sr-ste", "t-sr-ste", "slope", "fixed-mask", "step"])
def test_the_numbers_of_dense_math(method, kind, monkeypatch):
    ran, linear = [], cpu_kernels.linear
    monkeypatch.setattr(cpu_kernels, "linear", lambda *given: ran.append("linear") or linear(*given))
    both = [gradients(model, model) for model in (made(kind, backend, method=method) for backend in ("dense", "cpu"))]
    for expected, found in zip(*both, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert ran


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
@pytest.mark.parametrize("kind", LAYERS)
def test_compiled(kind):
    model = made(kind, "cpu", method="t-sr-ste")
    expected = gradients(model, model)
    model.zero_grad()
    for number, found in enumerate(gradients(model, torch.compile(model, fullgraph=True))):
        torch.testing.assert_close(found, expected[number], rtol=1e-4, atol=1e-4)
