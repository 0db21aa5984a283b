"""Layers whose packed values train: their three GEMMs, by the formulas, and what they keep."""

import copy

import pytest
import torch
from sparse_models import Largest
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_sparse24 import Sparse24Config, patch_model, sparse_run
from hf_sparse24.layers import packed as packed_layers
from hf_sparse24.layers.packed import PackedConv1D, PackedLinear
from hf_sparse24.methods import FixedMask, Values

CONFIG = Sparse24Config(method="fixed-mask", target_modules="all-linear", master="packed")
BF16 = torch.bfloat16


class Two(nn.Module):
    """A Linear and a Conv1D."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 40), Conv1D(24, 40)])

    def forward(self, x):
        return self.layers[1](self.layers[0](x).relu())


def made(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, list[torch.Tensor]]:
    """A model with packed masters, and its weights `[out, in]`, of which the two largest of every four are left."""
    torch.manual_seed(0)
    model = Two().to(dtype)
    dense = [model.layers[0].weight.detach().clone(), model.layers[1].weight.detach().t().clone()]
    nn.init.normal_(model.layers[1].bias)
    patch_model(model, CONFIG)
    return model, [weight * _largest(weight) for weight in dense]


def _largest(weight: torch.Tensor) -> torch.Tensor:
    """The mask, by sorting: no two magnitudes of a test are equal."""
    groups = weight.abs().unflatten(-1, (-1, 4))
    return (groups >= groups.sort(-1).values[..., 2:3]).flatten(-2)


@pytest.mark.parametrize("block", [1, 40 * 8 * 33, 1 << 30])  # one block of rows, two, all
def test_the_gradients_are_those_of_the_formulas(block, monkeypatch):
    monkeypatch.setitem(packed_layers.BLOCK_BYTES, "cpu", block)
    monkeypatch.setattr(packed_layers, "ROWS", 8)
    model, weights = made()
    assert [type(layer) for layer in model.layers] == [PackedLinear, PackedConv1D]
    for layer, weight in zip(model.layers, weights):
        x = torch.randn(2, 5, weight.shape[1], dtype=torch.float64, requires_grad=True)
        dz = torch.randn(2, 5, weight.shape[0], dtype=torch.float64)
        z = layer(x)
        torch.testing.assert_close(z, x @ weight.t() + layer.bias, rtol=1e-12, atol=1e-12)
        z.backward(dz)
        torch.testing.assert_close(x.grad, dz @ weight, rtol=1e-12, atol=1e-12)
        dw = dz.flatten(0, 1).t() @ x.detach().flatten(0, 1)
        kept = dw[weight != 0].view(len(dw), -1)
        torch.testing.assert_close(layer.packed_weight_values.grad, kept, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(layer.bias.grad, dz.sum((0, 1)), rtol=1e-12, atol=1e-12)
        assert [name for name, _ in layer.named_parameters()] == ["packed_weight_values", "bias"]


def test_a_weight_of_its_own_for_grad_input(monkeypatch):
    """As SLoPe has: the two largest of every four along the outputs are left for dX."""

    def prune_grad_input(method, view):
        assert view.dim == 1 and view.state == {}
        return Values(view.matrix * _largest(view.matrix.t()).t())

    monkeypatch.setattr(FixedMask, "prune_grad_input", prune_grad_input)
    model, (weight, _) = made()
    x = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
    dz = torch.randn(5, 40, dtype=torch.float64)
    model.layers[0](x).backward(dz)
    twice = weight * _largest(weight.t()).t()
    assert not torch.equal(twice, weight)
    torch.testing.assert_close(x.grad, dz @ twice, rtol=1e-12, atol=1e-12)


def test_no_dense_gradient_is_made(monkeypatch):
    """Nor a dense weight, where nothing asks for the gradient of the input."""
    monkeypatch.setitem(packed_layers.BLOCK_BYTES, "cpu", 1)
    monkeypatch.setattr(packed_layers, "ROWS", 8)
    model = nn.ModuleList([nn.Linear(64, 96)])
    patch_model(model, CONFIG)
    output = model[0](torch.randn(2, 64))
    with Largest() as largest:
        output.sum().backward()
    assert model[0].packed_weight_values.grad.shape == (96, 32)
    assert largest.elements == 96 * 32


def test_autocast_multiplies_in_bf16_and_trains_fp32_values():
    model, (weight, _) = made(torch.float32)
    layer, x, dz = model.layers[0], torch.randn(5, 16, requires_grad=True), torch.randn(5, 40).to(BF16)
    with torch.autocast("cpu", dtype=BF16):
        z = layer(x)
    z.backward(dz)
    rounded = x.detach().to(BF16)
    torch.testing.assert_close(z, nn.functional.linear(rounded, weight.to(BF16), layer.bias.to(BF16)))
    torch.testing.assert_close(x.grad, (dz @ weight.to(BF16)).float())
    values = layer.packed_weight_values
    assert values.dtype == values.grad.dtype == torch.float32
    expected = (dz.t() @ rounded).float()[weight != 0].view(40, 8)
    torch.testing.assert_close(values.grad, expected, rtol=1e-2, atol=1e-2)
    saved = []
    with torch.autocast("cpu", dtype=BF16), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        layer(x)
    assert any(tensor is values for tensor in saved)  # no copy of it in bf16 waits for the backward pass


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_compiled_it_trains_as_before():
    found = []
    for compiles in (False, True):
        model, _ = made(torch.float32)
        forward = torch.compile(model, fullgraph=True) if compiles else model
        torch.manual_seed(1)
        forward(torch.randn(6, 16)).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_copies_and_casts():
    model, _ = made(torch.float32)
    copied = copy.deepcopy(model)
    assert sparse_run(copied) is not sparse_run(model) and sparse_run(copied).config == CONFIG
    assert sparse_run(copied.layers[0]) is sparse_run(copied.layers[1])
    copied.layers[0].packed_weight_values.data.zero_()
    assert model.layers[0].weight.any() and not copied.layers[0].weight.any()
    model.to(BF16)
    assert model.layers[0].packed_weight_values.dtype == model.layers[0].weight.dtype == BF16
    assert model.layers[0].packed_weight_mask.dtype == torch.uint8
    assert "in=16, out=40, bias=True, dtype=torch.bfloat16, master" in repr(model)
