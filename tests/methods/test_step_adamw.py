"""StepAdamW as the paper has it, on literal numbers; the rule "drift" and clipping, which are ours, at the end."""

import copy
import io
import math

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import Trainer
from zoo import build

from hf_sparse24 import Sparse24Config, patch_model
from hf_sparse24.methods.auto_switch import SWITCH_RULES
from hf_sparse24.methods.step_adamw import StepAdamW, step_param_groups

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


def switch_after_steps(gradients, *, steps: int = 12, **arguments) -> int | None:
    """Feed one masked parameter gradients by step, and say when it switched."""
    parameter = nn.Parameter(torch.zeros(len(gradients(1))))
    optimizer = StepAdamW([{"params": [parameter], "masked": True}], **{**PAPER, "total_steps": 100, **arguments})
    for step in range(1, steps + 1):
        parameter.grad = torch.tensor(gradients(step))
        optimizer.step()
    return optimizer.switch_step


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


def test_the_switch_stays_between_its_limits():
    # Zero gradients: v never moves and z = 0 < eps from the start. The window of beta2 = 0.5 is 2 steps.
    zero = {"betas": (0.9, 0.5), "weight_decay": 0.0}
    assert switch_after_steps(lambda t: [0.0], **zero, switch_after=5) == 5
    assert switch_after_steps(lambda t: [0.0], **zero, switch_after=0) == 2  # not before the window is full
    assert switch_after_steps(lambda t: [0.0], betas=(0.9, 0.75), switch_after=0) == 4
    assert switch_after_steps(lambda t: [0.0], **zero, switch_after=0.07) == 7  # a fraction of 100 steps
    # A z that is never below eps: forced.
    assert switch_after_steps(lambda t: [float(t)], **zero, switch_by=11) == 11
    assert switch_after_steps(lambda t: [float(t)], **zero, switch_by=13) is None
    # switch_by comes before a window of 1000 is full
    assert switch_after_steps(lambda t: [0.0], switch_after=0, switch_by=6) == 6


@pytest.mark.parametrize("rule", ["arithmetic", "geometric"])
def test_the_window_mean_decides_on_literal_numbers(rule):
    """Gradients [sqrt 3, sqrt 3] at step 1 only, beta2 = 0.5: z = 1.5, 0.75, 0.375, 0.1875, ...

    Means of two: -, 1.125, 0.5625, 0.28125, 0.140625; the first below 0.3 is that of step 4.
    """
    gradients = lambda t: [3**0.5] * 2 if t == 1 else [0.0] * 2  # noqa: E731
    arguments = {"betas": (0.9, 0.5), "switch_rule": rule, "switch_after": 0}
    assert switch_after_steps(gradients, eps=0.3, **arguments) == 4
    assert switch_after_steps(gradients, eps=0.5626, **arguments) == 3
    assert switch_after_steps(gradients, eps=0.5624, **arguments) == 4
    assert switch_after_steps(gradients, eps=0.3, **{**arguments, "switch_after": 6}) == 6


def window(gradients: list[list[float]], rule: str, betas=(0.9, 0.5)) -> list[float]:
    """The z of the steps, several parameters at once."""
    params = [nn.Parameter(torch.zeros(len(values))) for values in gradients]
    groups = [{"params": params, "masked": True}]
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


def test_a_parameter_without_a_gradient_at_the_switch_is_corrected_too():
    params = parameters()
    optimizer = make(params, switch_by=2)
    train(optimizer, params, range(1))
    v = optimizer.state[params[1]]["exp_avg_sq"].clone()
    set_gradients(params, 1)
    params[1].grad = None
    optimizer.step()
    torch.testing.assert_close(optimizer.state[params[1]]["exp_avg_sq"], v / 0.05)


def test_only_masked_parameters_are_watched():
    masked, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    groups = [{"params": [other]}, {"params": [masked], "masked": True}]
    optimizer = StepAdamW(groups, betas=(0.9, 0.5), total_steps=100, switch_after=0, switch_rule="arithmetic")
    for step in range(3):
        masked.grad, other.grad = torch.zeros(2), torch.full((2,), 100.0 * step)
        optimizer.step()
    assert optimizer.switch_step == 2


def test_z_is_taken_only_where_a_decision_can_see_it():
    params = parameters()
    optimizer = make(params, total_steps=100, switch_after=30, switch_by=50)
    train(optimizer, params, range(10))
    assert optimizer._auto_switch["window"].isinf().all()  # of steps 1 to 10; step 30 looks back to 11
    train(optimizer, params, range(20))
    assert optimizer._auto_switch["window"].isfinite().all()


@pytest.mark.parametrize("phase_1_steps", [3, 8, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", SWITCH_RULES)
def test_resumed_equals_uninterrupted(phase_1_steps, dtype, rule):
    whole, first = parameters(dtype=dtype), parameters(dtype=dtype)
    arguments = {"eps": 0.04, "switch_after": 2, "betas": (0.9, 0.8), "switch_by": 10}
    if rule == "drift":  # windows of 2 steps; the gradients drift by more than 0.1 in one
        arguments |= {"betas": (0.9, 0.5), "switch_by": 14, "update_clip": 0.5}
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
    assert torch.equal(uninterrupted._auto_switch["window"], after._auto_switch["window"])
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
            "switch_rule='harmonic': must be one of \\['drift', 'arithmetic', 'geometric'\\]",
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


# --- the rule "drift" ---


def by_drift(gradient, *, steps: int = 60, **overrides) -> StepAdamW:
    """An optimizer after so many steps of one masked parameter. v is sampled every 2 steps, windows have 4."""
    parameter = nn.Parameter(torch.zeros(len(gradient(1))))
    arguments = {"betas": (0.9, 0.5), "total_steps": 80, "switch_after": 8, "switch_by": 70, "switch_rule": "drift"}
    optimizer = StepAdamW([{"params": [parameter], "masked": True}], **{**arguments, **overrides})
    for step in range(1, steps + 1):
        parameter.grad = torch.tensor(gradient(step))
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e4])
def test_drift_does_not_depend_on_the_scale_of_gradients(scale):
    """They grow by 2 % a step for 36 steps, so v by 17 % from window to window, and stay."""
    gradient = lambda t: [scale * 1.02 ** min(t, 36), 5 * scale * 1.02 ** min(t, 36)]  # noqa: E731
    assert by_drift(gradient, steps=36).switch_statistic == pytest.approx(8 * math.log(1.02), rel=1e-3)
    assert by_drift(gradient).switch_step == 40  # half of the change before 36 is left: 0.07
    # The paper's threshold is eps, whatever the scale.
    assert (by_drift(gradient, switch_rule="arithmetic").switch_step == 8) == (scale == 1e-8)


def test_drift_is_the_mean_over_weights_of_the_change_of_mean_logs():
    """v doubles with every step in one weight and halves in another: they do not cancel."""
    growing, shrinking = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    groups = [{"params": [growing, shrinking], "masked": True}]
    optimizer = StepAdamW(groups, betas=(0.9, 0.5), total_steps=80, switch_after=40, switch_by=79)
    assert math.isinf(optimizer.switch_statistic) and optimizer.switch_threshold == 0.1
    for step in range(1, 9):
        growing.grad = torch.full((2,), 2.0 ** (step / 2))
        shrinking.grad = torch.tensor([1.0, 10.0, 0.0]) * 2.0 ** (-step / 2)  # a dead entry has no log
        optimizer.step()

    def log_v(r, t):  # v^ of g^2 = r^t, but for a constant factor
        return math.log(r**t * (1 - (0.5 / r) ** t) / (1 - 0.5**t)) if r != 0.5 else math.log(t * 0.5**t / (1 - 0.5**t))

    change = [abs(log_v(r, 6) + log_v(r, 8) - log_v(r, 2) - log_v(r, 4)) / 2 for r in (2, 0.5)]
    assert optimizer.switch_statistic == pytest.approx(sum(change) / 2, rel=1e-4)


def test_windows_are_a_twentieth_of_the_run_in_multiples_of_adams_memory():
    assert by_drift(lambda t: [1.0]).switch_step == 8  # one window, and one to compare with it
    assert by_drift(lambda t: [1.0], switch_after=0).switch_step == 8
    assert by_drift(lambda t: [1.0], switch_after=11).switch_step == 11  # settled since 8
    assert by_drift(lambda t: [1.0], betas=(0.9, 0.9)).switch_step == 20  # sampled every 10 steps, windows of 10
    assert by_drift(lambda t: [2.0**t], steps=69).switch_step is None
    assert by_drift(lambda t: [2.0**t], steps=70).switch_step == 70


def test_drift_with_weights_that_join_late_die_or_turn_nan():
    early, late = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    groups = [{"params": [early, late], "masked": True}]
    optimizer = StepAdamW(groups, betas=(0.9, 0.5), total_steps=80, switch_after=16)
    for step in range(1, 31):
        early.grad, late.grad = torch.ones(2), torch.ones(2) if step > 14 else None
        optimizer.step()
        assert math.isinf(optimizer.switch_statistic) == (step < 8 or 16 <= step < 24)
    assert optimizer.switch_step == 24  # it misses the first sample of the window to 16
    assert by_drift(lambda t: [0.0, 0.0]).switch_step == 8
    assert by_drift(lambda t: [0.0], betas=(0.9, 0.9), switch_after=40).switch_statistic == 0.0
    assert by_drift(lambda t: [math.nan, 1.0]).switch_step is None


def test_the_state_of_another_rule_starts_anew():
    """As version 0.1 saved it, which had no name for the rule."""
    before = by_drift(lambda t: [1.0], steps=9, switch_rule="arithmetic").state_dict()
    saved = before["param_groups"][0]["auto_switch"]
    del saved["made_by"], saved["statistic"]
    after = by_drift(lambda t: [1.0], steps=1)
    after.load_state_dict(copy.deepcopy(before))
    assert math.isinf(after.switch_statistic) and after._auto_switch["window"].shape == (2, 1)
    assert after._auto_switch["step"] == 9
    after = by_drift(lambda t: [1.0], steps=1, switch_rule="arithmetic")
    after.load_state_dict(before)
    assert after._auto_switch["window"].isfinite().all() and after.switch_statistic < 1


def test_windows_of_another_length_start_anew():
    """A run that goes on with more steps, and betas that come from the checkpoint."""
    saved = by_drift(lambda t: [2.0**t], steps=7).state_dict()
    longer = by_drift(lambda t: [1.0], steps=1, total_steps=160)
    longer.load_state_dict(copy.deepcopy(saved))
    assert longer._auto_switch["window"].isinf().all() and longer._rule.window == 8
    other = by_drift(lambda t: [1.0], steps=1, betas=(0.9, 0.999))
    other.load_state_dict(saved)
    assert (other._rule.beta2, other._rule.window) == (0.5, 4) and other._auto_switch["window"].isfinite().all()


def test_a_masked_group_that_is_added_starts_the_windows_anew():
    optimizer = by_drift(lambda t: [1.0], steps=10, switch_after=12)
    late = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [late], "masked": True})
    first = optimizer.param_groups[0]["params"][0]
    for _ in range(14):
        first.grad, late.grad = torch.ones(1), torch.ones(3)
        optimizer.step()
    # The first sample of the window to step 12 is missing; the next two windows can be compared.
    assert optimizer._auto_switch["window"].shape == (2, 2) and optimizer.switch_step == 20


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
