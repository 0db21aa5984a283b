"""When StepAdamW switches: the rules of the paper on literal numbers, and "drift", which is ours."""

import copy
import math

import pytest
import torch
from step_adamw_runs import PAPER, make, parameters, train
from torch import nn

from hf_sparse24.methods.step_adamw import StepAdamW


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
