"""SLoPe on literal numbers and against its formulas: two masks, three GEMMs, AdamW on kept values, late adapters."""

import copy

import pytest
import torch
import zoo
from method_runs import STEPS, loop, run_steps
from sparse_models import logits, sparse_layer
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from hf_sparse24 import (
    Sparse24Config,
    Sparse24Controller,
    export_model,
    patch_model,
    sparse_weights,
    unpatch_model,
)
from hf_sparse24.run import SparseRun, set_phase, sparse_run
from hf_sparse24.weights.encodings import Wanted

WEIGHT = [
    [5.0, 1, -4, 2, 3, 0.5, 1, -6],
    [9, 6, 2, -3, -2, 7, 1, 4],
    [7, -2, 1, 8, 5, 1, -4, 2],
    [-2, 3, 4, 1, 1, 2, 9, -3],
]
ROW_MASK = [
    [1, 0, 1, 0, 1, 0, 0, 1],
    [1, 1, 0, 0, 0, 1, 0, 1],
    [1, 0, 0, 1, 1, 0, 1, 0],
    [0, 1, 1, 0, 0, 0, 1, 1],
]
BOTH_MASKS = [  # columns 0 and 7 have three entries each, of which the smallest goes
    [0, 0, 1, 0, 1, 0, 0, 1],
    [1, 1, 0, 0, 0, 1, 0, 1],
    [1, 0, 0, 1, 1, 0, 1, 0],
    [0, 1, 1, 0, 0, 0, 1, 0],
]


def make_layer(weight: torch.Tensor, conv1d: bool = False, **settings) -> nn.Module:
    """A sparse layer with this weight `[out, in]`."""
    out, inputs = weight.shape
    dense = Conv1D(out, inputs) if conv1d else nn.Linear(inputs, out)
    dense.to(weight.dtype).weight.data = weight.t().contiguous() if conv1d else weight.clone()
    run = SparseRun(Sparse24Config(method="slope", **settings))
    return sparse_layer(dense, run)


def backward_weight(layer: nn.Module) -> torch.Tensor:
    """What the grad_input GEMM multiplies by, `[out, in]`."""
    weight = layer.sparse24["weight"]
    (operand,) = weight.encoded([Wanted("grad_input")], layer.weight.dtype)
    return operand


def largest(weight: torch.Tensor, dim: int) -> torch.Tensor:
    """The mask of the two largest magnitudes of every four along `dim`, by sorting."""
    groups = weight.abs().movedim(dim, -1).unflatten(-1, (-1, 4))
    rank = groups.argsort(-1, descending=True).argsort(-1)
    return (rank < 2).flatten(-2).movedim(-1, dim)


def double(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def assert_close(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.shape == other.shape and float((one - other).detach().abs().max()) <= 1e-12


@pytest.mark.parametrize("conv1d", [False, True])
def test_the_two_masks_of_a_weight_written_by_hand(conv1d):
    layer = make_layer(torch.tensor(WEIGHT), conv1d)
    mask = layer.sparse24["weight"].mask()
    assert (mask.t() if conv1d else mask).int().tolist() == ROW_MASK
    forward = layer.sparse_weight().t() if conv1d else layer.sparse_weight()
    assert torch.equal(forward, torch.tensor(WEIGHT) * torch.tensor(ROW_MASK))
    assert torch.equal(backward_weight(layer), torch.tensor(WEIGHT) * torch.tensor(BOTH_MASKS))


def test_equal_layers_draw_different_masks_and_a_shared_weight_has_one():
    def masks() -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(64, 32) for _ in range(3))
        layers[1].weight.data = layers[0].weight.detach().clone()
        layers[2].weight = layers[0].weight
        patch_model(layers, Sparse24Config(method="slope", target_modules="all-linear", initial_mask="random"))
        return [layer.sparse24["weight"].mask() for layer in layers]

    first, equal, shared = masks()
    assert not torch.equal(first, equal) and torch.equal(first, shared)
    assert all(map(torch.equal, masks(), [first, equal, shared]))


def test_state_is_checked_along_the_input_alone():
    weight = make_layer(torch.randn(8, 8)).sparse24["weight"]
    (view,) = weight.views()
    assert weight.method.check_state(view) is None  # although columns keep more than two of four
    weight.state["mask_bits"].fill_(255)
    assert "along the input dimension in 16 groups" in weight.method.check_state(view)


def test_three_steps_are_adamw_on_the_kept_values_alone():
    """Two layers, against AdamW on `[out, in / 2]` values, whose gradients are written out."""
    torch.manual_seed(0)
    settings = {"lr": 0.1, "weight_decay": 0.3}
    dense = [double(16, 24), double(8, 16)]
    model = nn.ModuleList([nn.Linear(24, 16, bias=False), nn.Linear(16, 8, bias=False)]).double()
    for layer, weight in zip(model, dense):
        layer.weight.data = weight.clone()
    patch_model(model, Sparse24Config(method="slope", target_modules="all-linear"))
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    Sparse24Controller(model, optimizer, total_steps=3)

    masks = [largest(weight, 1) for weight in dense]
    values = [weight[mask].view(len(weight), -1) for weight, mask in zip(dense, masks)]
    compressed = torch.optim.AdamW(values, **settings)

    for _ in range(3):
        x, target = double(10, 24), double(10, 8)
        (model[1](model[0](x)) - target).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

        one, two = (torch.zeros_like(mask, dtype=v.dtype).masked_scatter_(mask, v) for mask, v in zip(masks, values))
        hidden = x @ one.t()
        grad = 2 * (hidden @ two.t() - target)
        grads = [(grad @ (two * largest(two, 0))).t() @ x, grad.t() @ hidden]
        for v, g, mask in zip(values, grads, masks):
            v.grad = g[mask].view_as(v)
        compressed.step()

        for layer, v, mask in zip(model, values, masks):
            moments, kept = optimizer.state[layer.weight], compressed.state[v]
            assert_close(layer.weight[mask].view_as(v), v)
            assert_close(moments["exp_avg"][mask].view_as(v), kept["exp_avg"])
            assert_close(moments["exp_avg_sq"][mask].view_as(v), kept["exp_avg_sq"])
            for tensor in (layer.weight, moments["exp_avg"], moments["exp_avg_sq"]):
                assert not tensor[~mask].any()


LATE = {"adapter_rank": 3, "adapter_steps": 0.25}


def adapted(name: str = "llama", **settings) -> nn.Module:
    model = zoo.build(name)
    patch_model(model, Sparse24Config(method="slope", target_modules="all-linear", **LATE | settings))
    return model


def test_phases_and_what_trains_in_each():
    model = adapted()
    optimizer, controller = loop(model)
    weights = sparse_weights(model).values()
    lefts = [weight.parameters["adapter_left"].detach().clone() for weight in weights]
    phases, moved = [], []
    for _ in range(STEPS):
        phases.append(controller.phase)
        run_steps(model, optimizer, controller, 1)
        moved.append(all(weight.parameters["adapter_right"].any() for weight in weights))
        if phases[-1] == "sparse":  # without a gradient, no step and no decay
            assert all(torch.equal(w.parameters["adapter_left"], left) for w, left in zip(weights, lefts))
    assert phases == ["sparse"] * 9 + ["adapters"] * 3 and controller.phase == "adapters"
    assert moved == [False] * 9 + [True] * 3
    assert all(torch.equal(weight.parameter, weight.pruned()) for weight in weights)  # the weight stays 2:4


@pytest.mark.parametrize(
    ("settings", "total", "phases"),
    [
        ({}, 100, ["sparse"] * 100),
        ({"adapter_rank": 4}, 250, ["sparse"] * 247 + ["adapters"] * 3),  # 1 %, rounded up
        ({"adapter_rank": 4, "adapter_steps": 2}, 5, ["sparse"] * 3 + ["adapters"] * 2),
        ({"adapter_rank": 4, "adapter_steps": 9}, 5, ["adapters"] * 5),
        ({"adapter_rank": 4, "adapter_steps": 3, "dense_start": 3}, 5, ["dense"] * 3 + ["adapters"] * 2),
        ({"adapter_steps": 2, "dense_tail": 1}, 4, ["sparse"] * 3 + ["dense"]),
    ],
)
def test_phase_by_step(settings, total, phases):
    method = SparseRun(Sparse24Config(method="slope", **settings)).method
    assert [method.phase(step, total, None) for step in range(total)] == phases


@pytest.mark.parametrize("initial_mask", ["magnitude", "random"])
@pytest.mark.parametrize("conv1d", [False, True])
def test_a_layer_is_the_formula_with_and_without_adapters_and_merges(conv1d, initial_mask):
    torch.manual_seed(0)
    weight, x, grad = double(16, 24), double(10, 24).requires_grad_(), double(10, 16)
    layer = make_layer(weight, conv1d, initial_mask=initial_mask, adapter_rank=3)
    sparse = layer.sparse24["weight"]
    left, right = sparse.parameters["adapter_left"], sparse.parameters["adapter_right"]
    assert left.shape == (24, 3) and right.shape == (3, 16) and not right.any()
    with torch.no_grad():
        right.copy_(double(3, 16))
    rows = sparse.mask().t() if conv1d else sparse.mask()
    assert torch.equal(rows, largest(weight, 1)) == (initial_mask == "magnitude")
    forward = weight * rows
    backward = forward * largest(forward, 0)
    output = layer(x)
    output.backward(grad)
    assert_close(output, x @ forward.t() + layer.bias)  # not yet
    assert_close(layer.weight.grad.t() if conv1d else layer.weight.grad, rows * (grad.t() @ x))
    assert_close(x.grad, grad @ backward)
    set_phase(layer, "adapters")
    x.grad = None
    output = layer(x)
    output.backward(grad)
    with torch.no_grad():
        assert_close(output, x @ forward.t() + layer.bias + x @ left @ right / 3)
        assert_close(x.grad, grad @ backward + grad @ right.t() @ left.t() / 3)
        assert_close(left.grad, x.t() @ (grad @ right.t()) / 3)
        assert_close(right.grad, (x @ left).t() @ grad / 3)
        merged = sparse.merged()
        assert_close(merged.t() if conv1d else merged, forward + (left @ right / 3).t())


def test_adapters_start_random_and_different():
    """N(0, 1) in each layer, another draw in each, the same whenever the same model is patched."""
    model, again = adapted(adapter_rank=32), adapted(adapter_rank=32)
    lefts, others = (
        [weight.parameters["adapter_left"].detach() for weight in sparse_weights(one).values()]
        for one in (model, again)
    )
    assert all(map(torch.equal, lefts, others))
    firsts = [float(left[0, 0]) for left in lefts]
    assert len(set(firsts)) == len(firsts) > 4
    draws = torch.cat([left.flatten() for left in lefts])
    error = len(draws) ** -0.5
    assert abs(float(draws.mean())) < 5 * error and abs(float(draws.std()) - 1) < 5 * error


def test_an_adapted_model_trains_on_and_is_saved_exported_and_unpatched(tmp_path):
    model = adapted("gpt2")
    run_steps(model, *loop(model), STEPS)
    assert model.config.quantization_config.facts.finished
    optimizer, controller = loop(model)
    run_steps(model, optimizer, controller, 1)
    assert sparse_run(model).phase == "adapters"  # further training goes on with them
    other = copy.deepcopy(model)
    masks = {name: weight.mask() for name, weight in sparse_weights(other).items()}
    set_phase(other, "sparse")
    assert all(torch.equal(weight.mask(), masks[name]) for name, weight in sparse_weights(other).items())
    Sparse24Controller(other, torch.optim.AdamW(other.parameters()), total_steps=STEPS)
    assert sparse_run(other).phase == "sparse"

    model.double()
    expected = logits(model)
    model.save_pretrained(tmp_path / "saved")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert sparse_run(reloaded).phase == "adapters" and torch.equal(logits(reloaded), expected)
    with pytest.raises(ValueError, match="of method 'slope' merged"):
        export_model(model, tmp_path / "packed", format="packed")
    export_model(model, tmp_path / "export")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    unpatch_model(model)
    for plain in (exported, model):
        assert_close(logits(plain), expected)


def test_adapters_of_frozen_weights_are_frozen():
    model = zoo.build("llama").requires_grad_(False)
    patch_model(model, Sparse24Config(method="slope", adapter_rank=2))
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"initial_mask": "wanda"}, "initial_mask='wanda': must be"),
        ({"adapter_rank": -1}, "adapter_rank=-1: must be"),
        ({"adapter_rank": True}, "adapter_rank=True: must be"),
        ({"adapter_steps": 0}, "adapter_steps=0: must be"),
        ({"adapter_rank": 4, "dense_tail": 0.1}, r"adapter_rank=4, dense_tail=0\.1: "),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Sparse24Config(method="slope", **settings)


def test_what_chose_the_state_cannot_change():
    model = adapted()
    with pytest.raises(ValueError, match="adapter_rank=3, now 4"):
        patch_model(model, Sparse24Config(method="slope", target_modules="all-linear", **LATE | {"adapter_rank": 4}))


def test_both_sizes_must_fill_their_groups():
    model = zoo.build("llama", intermediate_size=66)
    report = patch_model(model, Sparse24Config(method="slope", target_modules="all-linear"))
    assert report.skipped["model.layers.0.mlp.up_proj"] == "output size 66 is not a multiple of 4, as 'slope' needs"
    assert report.skipped["model.layers.0.mlp.down_proj"] == "input size 66 is not a multiple of 4"
