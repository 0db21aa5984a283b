"""Layers whose GEMMs run sparse on a CPU: the results and gradients of dense math, eager and compiled."""

import copy

import pytest
import torch
from sparse24_kernels.cpu.library import load
from sparse24_kernels.gemm import cpu_kernels
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_sparse24 import Sparse24Config, Sparse24Controller, patch_model
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
def test_the_numbers_of_dense_math(method, kind):
    both = [gradients(model, model) for model in (made(kind, backend, method=method) for backend in ("dense", "cpu"))]
    for expected, found in zip(*both, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["s-ste", "t-sr-ste"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(method, monkeypatch):
    ran = []
    mm, linear = cpu_kernels.mm, cpu_kernels.linear
    monkeypatch.setattr(cpu_kernels, "mm", lambda *given: ran.append("mm") or mm(*given))
    monkeypatch.setattr(cpu_kernels, "linear", lambda *given: ran.append("linear") or linear(*given))

    def run():
        model = made("Linear", "cpu", method=method)
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, Sparse24Controller(model, optimizer, total_steps=8)

    def train(steps, model, optimizer, controller):
        for step in steps:
            torch.manual_seed(step)
            model(torch.randn(2, 48, 96)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            controller.after_micro_step()

    whole, resumed = run(), run()
    train(range(3), *whole)
    for part, other in zip(whole, resumed):
        other.load_state_dict(copy.deepcopy(part.state_dict()))
    train(range(3, 8), *whole)
    train(range(3, 8), *resumed)
    for name, tensor in whole[0].state_dict().items():
        assert torch.equal(tensor, resumed[0].state_dict()[name]), name
    assert {"mm", "linear"} <= set(ran)


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
