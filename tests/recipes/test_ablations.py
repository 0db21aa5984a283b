"""The papers' ablations, methods outside the package, on literal numbers."""

import sys
from importlib import import_module

import pytest
import sparse24_kernels as kernels
import sparse_models
import torch
import train
import zoo
from arguments import UsageError, parse_arguments
from method_runs import loop, run_steps
from torch import nn

from hf_sparse24 import Sparse24Config, Sparse24Linear, patch_model
from hf_sparse24.methods import METHODS
from hf_sparse24.metrics import is_nm_sparse

NAMES = (
    "s-ste-gamma",
    "s-ste-fixed-scale",
    "s-ste-moving-scale",
    "s-ste-mvue-weight",
    "s-ste-greedy",
    "ste-greedy",
    "dense-weight",
)


@pytest.fixture(autouse=True, scope="module")
def ablations():
    """Registered for this module alone, so that tests of every method do not run them."""
    before = dict(METHODS)
    sys.modules.pop("ablations", None)
    import_module("ablations")
    assert set(NAMES) <= METHODS.keys()
    yield
    METHODS.clear()
    METHODS.update(before)


def make_layer(weight: torch.Tensor, **arguments) -> Sparse24Linear:
    model = nn.ModuleList([nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)])
    model[0].weight.data = weight.clone()
    patch_model(model, Sparse24Config(target_modules="all-linear", **arguments))
    return model[0]


@pytest.mark.parametrize("method", NAMES)
def test_it_trains_and_is_saved(method, tmp_path):
    model = sparse_models.patched("llama", method=method)
    before = model(**zoo.batch(0)).loss.item()
    run_steps(model, *loop(model), 4)
    assert model(**zoo.batch(0)).loss.item() < before
    model.eval().save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(**zoo.batch(0)).logits, model(**zoo.batch(0)).logits)


def test_gamma_moves_the_threshold_towards_the_smallest_that_is_kept():
    layer = make_layer(torch.tensor([[4.0, -1, -3, 2]]), method="s-ste-gamma", gamma=0.5)
    # t = 0.5 * 3 + 0.5 * 2, S = [1.5, 0, -0.5, 0], beta = (4 * 1.5 + 3 * 0.5) / (1.5^2 + 0.5^2)
    assert layer.scale.item() == 3.0
    assert layer.sparse_weight().tolist() == [[4.5, 0, -1.5, 0]]
    for rule, scale in (("none", 1), ("l1", 10 / 2)):
        layer = make_layer(torch.tensor([[4.0, -1, -3, 2]]), method="s-ste-gamma", gamma=0.5, scale_rule=rule)
        assert layer.scale.item() == scale
    weight = layer.sparse24["weight"]
    with pytest.raises(ValueError, match=r"gamma=0\.5"):
        weight.method.state_of_pruned(weight.views()[0])
    with pytest.raises(ValueError, match="gamma=1: must be"):
        Sparse24Config(method="s-ste-gamma", gamma=1)


def test_the_weight_of_grad_input_is_pruned_without_bias():
    """Every value of the weight has one draw; over many, the mean is the weight of the output GEMM."""
    copies = 25  # of 8 rows, one above the other: each group of four values is drawn by itself
    layer = make_layer(torch.randn(8, 8, dtype=torch.float64).repeat(copies, 1), method="s-ste-mvue-weight")
    method, view = layer.sparse24["weight"].method, layer.sparse24["weight"].views()[0]
    drawn = []
    for step in range(160):
        moved = view._replace(matrix=view.matrix + 1e-9 * step)
        drawn.append(method.prune_grad_input(moved).values)
    assert all(is_nm_sparse(values, dim=0) for values in drawn)
    assert torch.equal(drawn[0], method.prune_grad_input(view).values)
    assert not torch.equal(drawn[0] != 0, drawn[1] != 0)
    draws = torch.cat(drawn).unflatten(0, (-1, 8))
    assert len((draws[:copies] != 0).unique(dim=0)) > 1
    deviation = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - layer.sparse_weight()[:8]).abs() <= 5 * deviation + 1e-5).all()
    x = torch.zeros(8 * copies, 8, dtype=torch.float64, requires_grad=True)
    layer(x).backward(torch.eye(8 * copies, dtype=torch.float64))
    torch.testing.assert_close(x.grad, drawn[0])


@pytest.mark.parametrize("tokens", [16, 13])
def test_greedy_pruning_keeps_the_largest_gradients_of_every_four_tokens(tokens):
    layer = make_layer(torch.randn(8, 8, dtype=torch.float64), method="ste-greedy")
    x = torch.randn(tokens, 8, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(tokens, 8, dtype=torch.float64)
    layer(x).backward(grad)
    padded = torch.cat([grad, grad.new_zeros(-tokens % 4, 8)])
    pruned = kernels.nm_prune(padded, dim=0)[:tokens]
    torch.testing.assert_close(layer.weight.grad, pruned.t() @ x.detach())
    torch.testing.assert_close(x.grad, grad @ layer.sparse_weight())


def test_a_dense_weight_is_multiplied_whole_and_its_operands_are_pruned():
    weight = torch.randn(8, 8, dtype=torch.float64)
    x, grad = torch.randn(2, 16, 8, dtype=torch.float64).unbind()
    layer = make_layer(weight, method="dense-weight", estimators="greedy-gradients")
    given = x.clone().requires_grad_()
    output = layer(given)
    torch.testing.assert_close(output, x @ weight.t())
    output.backward(grad)
    torch.testing.assert_close(given.grad, grad @ weight)
    torch.testing.assert_close(layer.weight.grad, kernels.nm_prune(grad, dim=0).t() @ x)
    layer = make_layer(weight, method="dense-weight", estimators="mvue-activations")
    draws = torch.cat([layer(x.repeat(40, 1)).unflatten(0, (40, 16)) for _ in range(100)])
    deviation = draws.std(0) / len(draws) ** 0.5
    assert not torch.equal(draws[0], draws[1])
    assert ((draws.mean(0) - x @ weight.t()).abs() <= 5 * deviation).all()
    layer = make_layer(weight, method="dense-weight", activations="2:4")
    torch.testing.assert_close(layer(x), kernels.nm_prune(x) @ weight.t())


def test_a_recipe_imports_it_by_a_flag(tmp_path):
    flags = ["--output_dir", str(tmp_path), "--dataset", "texts", "--model_name_or_path", "model"]
    flags += ["--method", "ste-greedy"]
    parsed = parse_arguments(train.ARGUMENTS, [*flags, "--method_module", "ablations"])
    assert next(group for group in parsed if hasattr(group, "make_config")).make_config().method == "ste-greedy"
    with pytest.raises(UsageError, match="method_module='no_such'"):
        parse_arguments(train.ARGUMENTS, [*flags, "--method_module", "no_such"])
