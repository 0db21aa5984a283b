"""StepAdamW: AdamW until it switches by the paper's rules, then the formula with a frozen variance."""

import copy
import io
import math

import pytest
import torch
from torch import nn
from zoo import build

from hf_sparse24 import Sparse24Config, patch_model
from hf_sparse24.methods import StepAdamW, step_param_groups
from hf_sparse24.methods.step import SWITCH_RULES

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


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_both_phases_against_a_literal_float64_reference(clip):
    """An eps that counts, and gradients that grow after the switch, so that some steps are clipped."""
    params = parameters(dtype=torch.float64)
    expected = [p.detach().clone() for p in params]
    m, v = [torch.zeros_like(p) for p in expected], [torch.zeros_like(p) for p in expected]
    optimizer = make(params, switch_after=8, switch_by=8, eps=0.1, update_clip=clip)
    (beta1, beta2), clipped = WEIGHTS["betas"], 0
    for t in range(1, 16):
        set_gradients(params, t, scale=1.0 if t <= 8 else 5.0)
        for i, decay, lr in ((0, 0.1, 1e-2), (1, 0.0, 1e-2), (2, 0.1, 3e-3)):
            g = params[i].grad
            m[i] = beta1 * m[i] + (1 - beta1) * g
            frozen = i < 2 and t > 8
            if not frozen:
                v[i] = beta2 * v[i] + (1 - beta2) * g**2
            v_hat = v[i] / (1 - beta2 ** (8 if frozen else t))
            update = m[i] / (1 - beta1**t) / (v_hat.sqrt() + 0.1)
            if frozen and clip:
                clipped += int((update.abs() > clip).sum())
                update = update.clamp(-clip, clip)
            expected[i] = expected[i] - lr * decay * expected[i] - lr * update
        optimizer.step()
    assert optimizer.switch_step == 8 and bool(clipped) == bool(clip)
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in optimizer.state.values())
    for parameter, reference in zip(params, expected):
        torch.testing.assert_close(parameter.detach(), reference, rtol=1e-12, atol=1e-14)


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
    arguments = {"eps": 0.04, "switch_after": 2, "betas": (0.9, 0.8), "switch_by": 10, "switch_rule": rule}
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
    statistics = [float(o.first["auto_switch"]["statistic"]) for o in (uninterrupted, after)]
    assert statistics[0] == statistics[1] < math.inf


def test_the_state_of_another_optimizer_or_rule_is_refused():
    params = parameters()
    adamw = torch.optim.AdamW([{"params": [parameter]} for parameter in params])
    for other, rules in ((adamw, r"rules=\[\]"), (make(params, switch_rule="geometric"), r"rules=\['geometric'\]")):
        with pytest.raises(ValueError, match=rules):
            make(params).load_state_dict(other.state_dict())


def test_it_counts_in_fp32_where_new_tensors_are_bf16():
    """A bf16 number stops counting at 256."""
    params = parameters()
    torch.set_default_dtype(torch.bfloat16)
    try:
        train(optimizer := make(params), params, range(1))
    finally:
        torch.set_default_dtype(torch.float32)
    assert {state["step"].dtype for state in optimizer.state.values()} == {torch.float32}
    assert optimizer.first["auto_switch"]["window"].dtype == torch.float32


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
    with pytest.raises(RuntimeError, match=r"\(8, 4\) .*after step 8"):
        optimizer.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"switch_rule": "harmonic"}, "switch_rule='harmonic'"),
        ({"switch_after": 0.6, "switch_by": 0.5}, "switch_after=0.6 is 12 steps, switch_by=0.5 is 10, total_steps=20"),
        ({"switch_after": 0, "switch_by": 0}, "switch_by=0"),
        ({"switch_by": 20}, "switch_by=20"),
        ({"total_steps": 1}, "total_steps=1"),
        ({"update_clip": -1.0}, "update_clip=-1.0"),
        ({"eps": math.nan}, "eps=nan"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(parameters(), **arguments)


def test_wrong_groups():
    params = parameters()
    with pytest.raises(ValueError, match="'masked': True"):
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
    assert not any(group["weight_decay"] for group in step_param_groups(model, 0.1, []))


def switch_after_steps(gradients, *, steps: int = 12, **arguments) -> int | None:
    """Feed one masked parameter gradients by step, and say when it switched."""
    parameter = nn.Parameter(torch.zeros(len(gradients(1))))
    optimizer = StepAdamW([{"params": [parameter], "masked": True}], **{**PAPER, "total_steps": 100, **arguments})
    for step in range(1, steps + 1):
        parameter.grad = torch.tensor(gradients(step))
        optimizer.step()
    return optimizer.switch_step


def test_the_switch_stays_between_its_limits():
    # Zero gradients: v never moves and z = 0 < eps from the start. The window of beta2 = 0.5 is 2 steps.
    zero = {"betas": (0.9, 0.5), "weight_decay": 0.0}
    assert switch_after_steps(lambda t: [0.0], **zero, switch_after=5) == 5
    assert switch_after_steps(lambda t: [0.0], **zero, switch_after=0) == 1  # by what the window has so far
    assert switch_after_steps(lambda t: [0.0], switch_after=3) == 3  # of a window of 20
    assert switch_after_steps(lambda t: [0.0], **zero, switch_after=0.07) == 7  # a fraction of 100 steps
    # A z that is never below eps: forced.
    assert switch_after_steps(lambda t: [float(t)], **zero, switch_by=11) == 11
    assert switch_after_steps(lambda t: [float(t)], **zero, switch_by=13) is None


@pytest.mark.parametrize("rule", ["arithmetic", "geometric"])
def test_the_window_mean_decides_on_literal_numbers(rule):
    """Gradients [sqrt 3, sqrt 3] at step 1 only, beta2 = 0.5: z = 1.5, 0.75, 0.375, 0.1875, ...

    Means of the last two: 1.5, 1.125, 0.5625, 0.28125, 0.140625; the first below 0.3 is that of step 4.
    """
    gradients = lambda t: [3**0.5] * 2 if t == 1 else [0.0] * 2  # noqa: E731
    arguments = {"betas": (0.9, 0.5), "switch_rule": rule, "switch_after": 0}
    assert switch_after_steps(gradients, eps=0.3, **arguments) == 4
    assert switch_after_steps(gradients, eps=0.5626, **arguments) == 3


def window(gradients: list[list[float]], rule: str, betas=(0.9, 0.5)) -> list[float]:
    """The z of the steps, several parameters at once."""
    params = [nn.Parameter(torch.zeros(len(values))) for values in gradients]
    groups = [{"params": params, "masked": True}]
    groups.append({"params": [other := nn.Parameter(torch.zeros(2))]})  # not masked, so not watched
    other.grad = torch.full((2,), 100.0)
    optimizer = StepAdamW(groups, betas=betas, total_steps=100, switch_rule=rule, switch_after=0)
    for parameter, values in zip(params, gradients):
        parameter.grad = torch.tensor(values)
    optimizer.step()
    return optimizer.param_groups[0]["auto_switch"]["window"].tolist()


def test_means_are_taken_over_all_entries_of_all_parameters():
    # |dv| = 0.5 g^2: 0.5, 2, 8 and 0.5 in parameters of 3 and 1 entries; step 1 stands in slot 1.
    gradients = [[1.0, -2.0, 4.0], [1.0]]
    assert window(gradients, "arithmetic") == [math.inf, pytest.approx(11 / 4)]
    assert window(gradients, "geometric") == [math.inf, pytest.approx((0.5 * 2 * 8 * 0.5) ** 0.25)]


def test_the_window_of_095_is_20_steps():
    assert len(window([[1.0]], "arithmetic", betas=(0.9, 0.95))) == 20  # 1 / (1 - 0.95) is 19.999999999999982
    assert len(window([[1.0]], "arithmetic", betas=(0.9, 0.999))) == 1000


def test_dead_entries_do_not_decide_the_geometric_mean():
    assert window([[1.0, 4.0, 0.0]], "geometric")[1] == pytest.approx((0.5 * 8) ** 0.5)
    assert window([[0.0, 0.0]], "geometric")[1] == pytest.approx(0.5)
    arguments = {"betas": (0.9, 0.5), "switch_rule": "geometric", "switch_after": 0, "eps": 1e-3}
    assert switch_after_steps(lambda t: [float(t), 0.0], **arguments) is None
