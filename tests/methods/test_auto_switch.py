"""When StepAdamW switches: the rules of the paper on literal numbers."""

import math

import pytest
import torch
from step_adamw_runs import PAPER
from torch import nn

from hf_sparse24.methods import StepAdamW


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
