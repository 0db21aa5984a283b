"""The settings that only the papers' ablations take, on literal numbers."""

import pytest
import sparse24_kernels as kernels
import sparse_models
import torch
import zoo
from torch import nn
from transformers import AutoModelForCausalLM

from hf_sparse24 import (
    Sparse24Config,
    Sparse24Controller,
    Sparse24Linear,
    patch_model,
    sparse_run,
    sparse_weights,
)
from hf_sparse24.metrics import is_nm_sparse
from hf_sparse24.run import SparseRun


def make_layer(weight: torch.Tensor, **arguments) -> Sparse24Linear:
    linear = nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
    return Sparse24Linear.from_dense(linear, SparseRun(Sparse24Config(**arguments)))


def test_gamma_moves_the_threshold_towards_the_smallest_that_is_kept():
    layer = make_layer(torch.tensor([[4.0, -1, -3, 2]]), threshold_gamma=0.5)
    # t = 0.5 * 3 + 0.5 * 2, S = [1.5, 0, -0.5, 0], beta = (4 * 1.5 + 3 * 0.5) / (1.5^2 + 0.5^2)
    assert layer.scale.item() == 3.0
    assert layer.sparse_weight().tolist() == [[4.5, 0, -1.5, 0]]
    layer = make_layer(torch.tensor([[4.0, -1, -3, 2]]), threshold_gamma=0.5, scale_rule="l1")
    assert layer.scale.item() == 10 / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gamma_is_continuous_at_zero_and_stays_2_4(dtype):
    weight = torch.randn(16, 32, dtype=dtype)
    plain = make_layer(weight)
    for gamma in (1e-9, 0.9):
        layer = make_layer(weight, threshold_gamma=gamma)
        assert is_nm_sparse(layer.sparse_weight())
        if gamma < 0.5:
            torch.testing.assert_close(layer.sparse_weight(), plain.sparse_weight())
        zeros = layer.sparse_weight()[layer.sparse_weight() == 0]
        assert not zeros.signbit().any()


def test_nothing_is_merged_into_weights_that_gamma_would_prune_once_more():
    layer = make_layer(torch.randn(4, 8), threshold_gamma=0.5)
    weight = layer.sparse24["weight"]
    with pytest.raises(ValueError, match=r"threshold_gamma=0\.5 prunes a 2:4 weight once more"):
        weight.method.state_of_pruned(weight.views()[0])


def test_a_number_is_the_scale_of_all_weights_and_scales_are_logged():
    model = sparse_models.patched("llama", method="s-ste", scale_rule=1.25)
    controller = Sparse24Controller(model, torch.optim.AdamW(model.parameters()), total_steps=2)
    assert all(weight.state["scale"] == 1.25 for weight in sparse_weights(model).values())
    metrics = controller.metrics()
    assert (metrics["scale_mean"], metrics["scale_max"]) == (1.25, 1.25)
    weight = next(iter(sparse_weights(model).values()))
    assert weight.method.check_state(weight.views()[0]) is None
    weight.state["scale"].fill_(2.0)
    assert "scale is 2, and scale_rule is 1.25" in weight.method.check_state(weight.views()[0])


def test_a_scale_that_is_not_frozen_follows_the_weights():
    model = sparse_models.patched("llama", method="s-ste", scale_frozen=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-1)
    controller = Sparse24Controller(model, optimizer, total_steps=2)
    before = controller.metrics()["scale_mean"]
    model(**zoo.batch(0)).loss.backward()
    optimizer.step()
    assert controller.metrics()["scale_mean"] != before


def grad_input(layer: Sparse24Linear, key: int) -> torch.Tensor:
    """dX for dZ = 1: what the grad_input GEMM multiplies by."""
    layer.sparse24["weight"].rng_key = torch.tensor(key)
    out, inputs = layer.weight.shape
    x = torch.zeros(out, inputs, dtype=layer.weight.dtype, requires_grad=True)
    layer(x).backward(torch.eye(out, dtype=layer.weight.dtype))
    return x.grad


def test_the_weight_of_grad_input_is_pruned_without_bias():
    layer = make_layer(torch.randn(8, 8, dtype=torch.float64), grad_input_weight="mvue").eval()
    exact, draws = layer.sparse_weight(), [grad_input(layer, 1000 * key) for key in range(4000)]
    assert all(is_nm_sparse(draw, dim=0) for draw in draws[:100]) and not torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], grad_input(layer, 0))
    deviation = torch.stack(draws).std(0) / len(draws) ** 0.5
    assert ((torch.stack(draws).mean(0) - exact).abs() <= 5 * deviation + 1e-9).all()


def test_a_transposable_mask_leaves_nothing_to_prune_in_grad_input():
    layer = make_layer(torch.randn(8, 8), method="t-sr-ste", grad_input_weight="mvue")
    assert torch.equal(grad_input(layer, 0), layer.sparse_weight())


@pytest.mark.parametrize("tokens", [16, 13])
def test_greedy_pruning_keeps_the_largest_gradients_of_every_four_tokens(tokens):
    layer = make_layer(torch.randn(8, 8, dtype=torch.float64), weight_grad="magnitude", input_grad="magnitude")
    x = torch.randn(tokens, 8, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(tokens, 8, dtype=torch.float64)
    layer(x).backward(grad)
    padded = torch.cat([grad, grad.new_zeros(-tokens % 4, 8)])
    pruned = kernels.nm_prune(padded, dim=0)[:tokens]
    torch.testing.assert_close(layer.weight.grad, pruned.t() @ x.detach())
    torch.testing.assert_close(x.grad, kernels.nm_prune(grad) @ layer.sparse_weight())


@pytest.mark.parametrize("setting", [{"scale_rule": 3.0}, {"scale_rule": "none"}, {"threshold_gamma": 0.5}])
def test_a_scale_that_is_frozen_is_not_made_anew_by_another_setting(setting, tmp_path):
    model = sparse_models.patched("llama", method="s-ste")
    name = next(iter(setting))
    with pytest.raises(ValueError, match=rf"already patched with another config \({name}="):
        patch_model(model, Sparse24Config(method="s-ste", **setting))
    with pytest.raises(ValueError, match=rf"{name}=.*: the state of the weights was made with"):
        sparse_run(model).change_settings(**setting)
    model.save_pretrained(tmp_path)
    with (
        pytest.warns(UserWarning, match="You passed .quantization_config."),
        pytest.raises(ValueError, match=rf"was saved with another config \({name}="),
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=Sparse24Config(method="s-ste", **setting))
    patch_model(model, Sparse24Config(method="s-ste", weight_grad="dense"))
