"""StepAdamW as the paper has it, on literal numbers; clipping, which is ours, at the end."""

import copy
import io
import math

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from step_adamw_runs import PAPER, WEIGHTS, make, parameters, set_gradients, train
from torch import nn
from transformers import Trainer
from zoo import build

from hf_sparse24 import Sparse24Config, patch_model
from hf_sparse24.methods import StepAdamW, step_param_groups
from hf_sparse24.methods.step_adamw import SWITCH_RULES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_before_the_switch_it_is_adamw_bit_for_bit(dtype):
    ours, theirs = parameters(dtype=dtype), parameters(dtype=dtype)
    optimizer = make(ours, total_steps=100, switch_by=50)
    groups = [
        {"params": [theirs[0]]},
        {"params": [theirs[1]], "weight_decay": 0.0},
        {"params": [theirs[2]], "lr": 3e-3},
    ]
    reference = torch.optim.AdamW(groups, **WEIGHTS)
    schedulers = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, 30) for o in (optimizer, reference)]
    for step in range(30):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        if step == 7:
            ours[0].grad = theirs[0].grad = None
        optimizer.step()
        reference.step()
        for scheduler in schedulers:
            scheduler.step()
    assert not optimizer.switched
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


def test_both_phases_against_a_literal_float64_reference():
    params = parameters(dtype=torch.float64)
    expected = [p.detach().clone() for p in params]
    m, v = [torch.zeros_like(p) for p in expected], [torch.zeros_like(p) for p in expected]
    optimizer = make(params, switch_by=8)
    beta1, beta2 = WEIGHTS["betas"]
    for t in range(1, 16):
        set_gradients(params, t)
        for i, decay, lr in ((0, 0.1, 1e-2), (1, 0.0, 1e-2), (2, 0.1, 3e-3)):
            g = params[i].grad
            m[i] = beta1 * m[i] + (1 - beta1) * g
            frozen = i < 2 and t > 8
            if not frozen:
                v[i] = beta2 * v[i] + (1 - beta2) * g**2
            v_hat = v[i] / (1 - beta2 ** (8 if frozen else t))
            update = m[i] / (1 - beta1**t) / (v_hat.sqrt() + 1e-8)
            expected[i] = expected[i] - lr * decay * expected[i] - lr * update
        optimizer.step()
    assert optimizer.switch_step == 8
    for parameter, reference in zip(params, expected):
        torch.testing.assert_close(parameter.detach(), reference, rtol=1e-12, atol=1e-14)


def test_literal_steps():
    """lr 1, no decay, betas (0, 0.5): phase 1 divides by sqrt of v^; v* is v^ after step 2, whatever comes."""
    weight = nn.Parameter(torch.tensor([0.0]))
    groups = [{"params": [weight], "masked": True}]
    optimizer = StepAdamW(
        groups, lr=1.0, betas=(0.0, 0.5), eps=0.0, weight_decay=0.0, total_steps=9, switch_by=2, **PAPER
    )
    seen = []
    for gradient in (2.0, 4.0, 100.0, -1.0):
        weight.grad = torch.tensor([gradient])
        before = weight.item()
        optimizer.step()
        seen.append(before - weight.item())
    # v = 2, then 9; v^ = 2 / 0.5 = 4, then 9 / 0.75 = 12
    assert seen == pytest.approx([2 / 2, 4 / 12**0.5, 100 / 12**0.5, -1 / 12**0.5], rel=1e-5)
    assert optimizer.state[weight]["exp_avg_sq"].item() == pytest.approx(12)


def test_eps_stands_beside_the_root():
    weight = nn.Parameter(torch.tensor([0.0]))
    groups = [{"params": [weight], "masked": True}]
    optimizer = StepAdamW(
        groups, lr=1.0, betas=(0.0, 0.5), eps=1.0, weight_decay=0.0, total_steps=9, switch_by=1, **PAPER
    )
    for gradient in (3.0, 8.0):
        weight.grad = torch.tensor([gradient])
        optimizer.step()
    assert weight.item() == pytest.approx(-3 / (3 + 1) - 8 / (3 + 1))


def test_the_step_size_does_not_jump_at_the_switch():
    """Constant gradients: every step is lr, also after a switch long before v has filled up."""
    weight = nn.Parameter(torch.zeros(3))
    groups = [{"params": [weight], "masked": True}]
    optimizer = StepAdamW(groups, lr=1e-3, weight_decay=0.0, total_steps=100, switch_by=10)
    for step in range(1, 31):
        weight.grad = torch.full((3,), 0.5)
        optimizer.step()
        torch.testing.assert_close(weight.detach(), torch.full((3,), -1e-3 * step), rtol=1e-4, atol=0)


def test_a_parameter_without_a_gradient_at_the_switch_is_corrected_too():
    params = parameters()
    optimizer = make(params, switch_by=2)
    train(optimizer, params, range(1))
    v = optimizer.state[params[1]]["exp_avg_sq"].clone()
    set_gradients(params, 1)
    params[1].grad = None
    optimizer.step()
    torch.testing.assert_close(optimizer.state[params[1]]["exp_avg_sq"], v / 0.05)


@pytest.mark.parametrize("phase_1_steps", [3, 8, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", SWITCH_RULES)
def test_resumed_equals_uninterrupted(phase_1_steps, dtype, rule):
    whole, first = parameters(dtype=dtype), parameters(dtype=dtype)
    arguments = {"eps": 0.04, "switch_after": 2, "betas": (0.9, 0.8), "switch_by": 10}
    arguments["switch_rule"] = rule
    uninterrupted, before = make(whole, **arguments), make(first, **arguments)
    train(uninterrupted, whole, range(16), scale=0.7)
    train(before, first, range(phase_1_steps), scale=0.7)
    saved = io.BytesIO()
    torch.save(before.state_dict(), saved)
    saved.seek(0)
    second = copy.deepcopy(first)
    after = make(second, **arguments)
    after.load_state_dict(torch.load(saved, weights_only=True))
    assert after.switched == before.switched and after.switch_step == before.switch_step
    train(after, second, range(phase_1_steps, 16), scale=0.7)
    assert uninterrupted.switch_step == after.switch_step is not None
    assert all(torch.equal(a, b) for a, b in zip(whole, second))
    assert torch.equal(*(o.param_groups[0]["auto_switch"]["window"] for o in (uninterrupted, after)))
    assert uninterrupted.switch_statistic == after.switch_statistic < math.inf


def test_the_state_of_another_optimizer_is_refused():
    params = parameters()
    groups = [{"params": [parameter]} for parameter in params]
    with pytest.raises(ValueError, match="not the state of a StepAdamW"):
        make(params).load_state_dict(torch.optim.AdamW(groups).state_dict())


def test_no_memory_beyond_adamws():
    params = parameters()
    optimizer = make(params)
    for steps in (range(3), range(3, 12)):
        train(optimizer, params, steps)
        assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in optimizer.state.values())


def test_variance_is_frozen_for_masked_parameters_only():
    params = parameters()
    optimizer = make(params)
    train(optimizer, params, range(8))
    assert optimizer.switched
    before = [optimizer.state[parameter]["exp_avg_sq"].clone() for parameter in params]
    train(optimizer, params, range(8, 10))
    after = [optimizer.state[parameter]["exp_avg_sq"] for parameter in params]
    assert [torch.equal(a, b) for a, b in zip(before, after)] == [True, True, False]


def test_closure():
    weight = nn.Parameter(torch.tensor([3.0]))
    optimizer = StepAdamW([{"params": [weight], "masked": True}], total_steps=10)

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 9.0
    assert weight.item() == pytest.approx(3 * (1 - 1e-5) - 1e-3)


@pytest.mark.parametrize("update_clip", [0.0, 1.0])
@pytest.mark.parametrize("steps_before", [2, 9])
def test_nan_gradients_show_and_never_switch(steps_before, update_clip):
    params = parameters()
    optimizer = make(params, eps=1e9, switch_after=4, update_clip=update_clip)
    train(optimizer, params, range(steps_before))
    set_gradients(params, 99)
    params[0].grad[0, 0] = math.nan
    optimizer.step()
    assert params[0][0, 0].isnan() and params[0].isnan().sum() == 1
    train(optimizer, params, range(3))
    assert optimizer.switched == (steps_before == 9)  # a NaN in the window is below nothing; switch_by = 8 still holds


def test_steps_without_gradients():
    params = parameters()
    optimizer = make(params)
    assert optimizer.step() is None
    train(optimizer, params, range(3))
    optimizer.zero_grad()
    before = [parameter.detach().clone() for parameter in params]
    for _ in range(6):
        optimizer.step()
    assert optimizer.switched and all(torch.equal(a, b) for a, b in zip(before, params))


def test_a_first_gradient_after_the_switch():
    params = parameters()
    optimizer = make(params)
    train(optimizer, params[:1], range(8))
    set_gradients(params, 8)
    params[1].grad = None
    optimizer.step()  # one that is not masked may come late
    set_gradients(params, 9)
    with pytest.raises(RuntimeError, match=r"masked parameter of shape \(8, 4\) got its first gradient after step 8"):
        optimizer.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"switch_rule": "harmonic"},
            "switch_rule='harmonic': must be one of \\['arithmetic', 'geometric'\\]",
        ),
        ({"switch_after": 0.6, "switch_by": 0.5}, "switch_after=0.6 is 12 steps, switch_by=0.5 is 10, total_steps=20"),
        ({"switch_after": 0, "switch_by": 0}, "1 <= switch_by < total_steps"),
        ({"switch_by": 20}, "1 <= switch_by < total_steps"),
        ({"total_steps": 1}, "total_steps=1"),
        ({"lr": -1.0}, "lr=-1.0: must be a finite number >= 0"),
        ({"update_clip": -1.0}, "update_clip=-1.0: must be a finite number >= 0"),
        ({"eps": math.nan}, "eps=nan: must be a finite number >= 0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\): must be in \[0, 1\)"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(parameters(), **arguments)


def test_wrong_groups():
    params = parameters()
    with pytest.raises(
        ValueError, match="no parameter group has 'masked': True; make the groups with step_param_groups"
    ):
        StepAdamW(params, total_steps=10)
    groups = [{"params": [params[0]], "masked": True}, {"params": [params[1]], "masked": True, "eps": 1e-6}]
    with pytest.raises(ValueError, match="masked groups differ in betas or eps"):
        StepAdamW(groups, total_steps=10)


def test_groups_of_a_patched_model():
    model = build("gpt2")
    patch_model(model, Sparse24Config(method="step"))
    model.transformer.h[1].mlp.c_fc.weight.requires_grad_(False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = step_param_groups(model, 0.1)
    by_kind = {(g["masked"], g["weight_decay"]): {names[id(p)] for p in g["params"]} for g in groups}
    assert by_kind[True, 0.1] == {
        "transformer.h.0.mlp.c_fc.weight",
        "transformer.h.0.mlp.c_proj.weight",
        "transformer.h.1.mlp.c_proj.weight",
    }
    assert "transformer.h.0.attn.c_attn.weight" in by_kind[False, 0.1]
    assert "transformer.wte.weight" in by_kind[False, 0.1]
    assert {"transformer.ln_f.weight", "transformer.h.0.mlp.c_fc.bias"} <= by_kind[False, 0.0]
    assert set(by_kind) == {(True, 0.1), (False, 0.1), (False, 0.0)}
    assert sum(len(g["params"]) for g in groups) == len(names) - 1


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_the_default_decay_is_the_trainers(name):
    model = build(name)
    patch_model(model, Sparse24Config(method="step"))
    trainers = Trainer.get_decay_parameter_names(None, model)
    ours, theirs = step_param_groups(model, 0.1), step_param_groups(model, 0.1, trainers)
    assert [[id(p) for p in g["params"]] for g in ours] == [[id(p) for p in g["params"]] for g in theirs]
    assert step_param_groups(model, 0.1, [])[0]["weight_decay"] == 0.0


def test_in_accelerates_wrapper():
    ours, wrapped = parameters(), parameters()
    optimizer, inner = make(ours), make(wrapped)
    Accelerator(cpu=True)
    outer = AcceleratedOptimizer(inner)  # loads the state back into the optimizer
    for step in range(12):
        set_gradients(ours, step)
        set_gradients(wrapped, step)
        optimizer.step()
        outer.step()
    assert inner.switched and all(torch.equal(a, b) for a, b in zip(ours, wrapped))


def test_copies_go_their_own_way():
    params = parameters()
    optimizer = make(params)
    train(optimizer, params, range(3))
    twin = copy.deepcopy(optimizer)
    train(optimizer, params, range(3, 9))
    assert optimizer.switched and not twin.switched


# --- clipping ---


def test_a_frozen_step_is_clipped_to_the_learning_rate():
    """A v* of gradients of 0.1, then gradients of 1: m^ / sqrt(v*) is 10 in the end, and the step lr."""
    steps = {}
    for clip in (0.0, 1.0, 2.5):
        weight = nn.Parameter(torch.zeros(2))
        groups = [{"params": [weight], "masked": True}]
        optimizer = StepAdamW(groups, lr=1e-2, weight_decay=0.0, total_steps=200, switch_by=50, update_clip=clip)
        for step in range(1, 151):
            before = weight.detach().clone()
            weight.grad = torch.tensor([0.1, -0.1]) * (1 if step <= 50 else 10)
            optimizer.step()
        steps[clip] = (before - weight.detach()).tolist()
    assert steps[0.0] == pytest.approx([0.1, -0.1], rel=1e-3)
    assert steps[1.0] == pytest.approx([0.01, -0.01], rel=1e-5)
    assert steps[2.5] == pytest.approx([0.025, -0.025], rel=1e-5)


def test_clipping_changes_nothing_where_steps_are_short():
    paper, clipped = parameters(dtype=torch.float64), parameters(dtype=torch.float64)
    for params, clip in ((paper, 0.0), (clipped, 1e6)):
        train(make(params, update_clip=clip), params, range(20))
    for a, b in zip(paper, clipped):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)
