"""AutoSwitch: when Adam's variance v has settled, so that STEP may freeze it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..sharding import local, total
from .schedule import to_steps

SWITCH_RULES = ("drift", "arithmetic", "geometric")
DRIFT = 0.1
_WINDOWS = 20  # of "drift" in a run


class AutoSwitch:
    """Compares a statistic of v with a threshold, by one of three rules.

    * "drift", ours: at the end of every window of L steps, how much the variance of a weight grew or shrank in it:
      `|mean log v_t - mean log v_{t-L}|` over its entries, averaged over all weights; settled below 0.1. L is a
      twentieth of the run, or `floor(1 / (1 - beta2))` where that is longer.
    * "arithmetic", the paper's option I: `z_t = mean |v_t - v_{t-1}|` over all entries of all weights, averaged over
      the last `floor(1 / (1 - beta2))` steps; settled below Adam's eps.
    * "geometric", option II: the same with `z_t = exp(mean log |v_t - v_{t-1}|)`.

    The paper's rules compare a change of v, which has the units of squared gradients, with eps, which has those of a
    gradient: where gradients are small they are fulfilled at once, where they are large never. The ratio of v and an
    earlier v has no units. Its logs are averaged, because half of the entries may move where the mean of v, which a few
    large ones make, does not; and over a longer window, because v forgets within `1 / (1 - beta2)` steps, and each
    batch moves it.

    What it has seen is in a dict that the optimizer saves. `window` there is what the statistic is made of: z of the
    last steps, or the mean log v of each weight at the end of the last window. It is filled with inf, which makes the
    statistic inf until all of it has been written.

    Args:
        rule: one of `SWITCH_RULES`.
        total_steps: optimizer steps of the run.
        switch_after: length of training before which it never says that v has settled.
        switch_by: length of training at which it says so in any case.
        beta2, eps: Adam's.

    Raises:
        ValueError: an unknown rule; lengths out of order, or not shorter than the run.
    """

    def __init__(
        self, rule: str, total_steps: int, switch_after: int | float, switch_by: int | float, beta2: float, eps: float
    ):
        if rule not in SWITCH_RULES:
            raise ValueError(f"switch_rule={rule!r}: must be one of {list(SWITCH_RULES)}")
        self.rule, self.beta2 = rule, beta2
        self.after, self.by = to_steps(switch_after, total_steps), to_steps(switch_by, total_steps)
        if not (0 <= self.after <= self.by and 1 <= self.by < total_steps):
            raise ValueError(
                f"switch_after={switch_after} is {self.after} steps, switch_by={switch_by} is {self.by}, "
                f"total_steps={total_steps}: must have 0 <= switch_after <= switch_by and 1 <= switch_by < total_steps"
            )
        # The small addition makes 20 of 1 / (1 - 0.95), which float noise puts below 20.
        self.length = math.floor(1 / (1 - beta2) + 1e-6)
        self.threshold = eps
        if rule == "drift":
            self.length, self.threshold = max(self.length, math.ceil(total_steps / _WINDOWS)), DRIFT

    def nothing_seen(self, weights: Sequence[Tensor]) -> dict[str, Any]:
        """What is saved before the first step."""
        length = len(weights) if self.rule == "drift" else self.length
        window = torch.full((length,), math.inf, device=weights[0].device)
        return {"rule": self.rule, "window": window, "statistic": torch.tensor(math.inf)}

    def before_step(
        self, seen: dict[str, Any], step: int, gradients: list[Tensor], variances: list[Tensor], owners: list[Tensor]
    ) -> None:
        """The paper's rules: write z of step `step` into the window, if any decision will look at it.

        Args:
            gradients, variances: what this process holds of those of the parameters `owners`.
        """
        if self.rule == "drift" or step <= self.after - self.length or not owners:
            return
        seen["window"] = window = seen["window"].to(owners[0].device)
        # v_t - v_{t-1} = (1 - beta2) (g^2 - v_{t-1}), so that no copy of v is needed.
        distance = _mean_distance(gradients, variances, owners, self.rule, window.device)
        window[step % self.length] = (1 - self.beta2) * distance
        seen["statistic"] = window.mean()

    def after_step(
        self, seen: dict[str, Any], step: int, weights: Sequence[Tensor], states: Mapping[Tensor, dict[str, Any]]
    ) -> None:
        """The rule "drift": at the end of a window, compare mean log v with that at the end before.

        Args:
            weights: all of them; those that never had a gradient have no state, and are left out.
        """
        if self.rule != "drift" or step % self.length or step < self.after - self.length:
            return
        known = [index for index, weight in enumerate(weights) if weight in states]
        if not known:
            return
        owners = [weights[index] for index in known]
        variances = [local(states[owner]["exp_avg_sq"]) for owner in owners]
        bias = torch.tensor([1 - self.beta2 ** states[owner]["step"].item() for owner in owners])
        logs, last = _mean_logs(variances, owners) - bias.log(), seen["window"].cpu()
        seen["statistic"] = (logs - last[known]).abs().mean()
        seen["window"] = last.index_copy(0, torch.tensor(known), logs)

    def has_settled(self, seen: dict[str, Any], step: int) -> bool:
        """Whether v may be frozen after step `step`."""
        return step >= self.by or (step >= self.after and bool(seen["statistic"] < self.threshold))


def _mean_distance(
    gradients: list[Tensor], variances: list[Tensor], owners: list[Tensor], rule: str, device: torch.device
) -> Tensor:
    """The mean of |g^2 - v| over all entries, on all processes, an fp32 scalar on `device`: z_t / (1 - beta2).

    The geometric mean leaves out entries where it is 0. One dead entry would make it zero, and so switch at
    `switch_after` whatever all others do. If every entry is dead, it is 1.
    """
    sums = []
    # One weight after the other: the lists' functions would hold the distances of all weights at once, which takes
    # memory and, on a CPU, ten times as long.
    for gradient, variance in zip(gradients, variances):
        distance = torch.addcmul(variance, gradient, gradient, value=-1).abs_()
        if rule == "arithmetic":
            count = torch.tensor(float(distance.numel()))
        else:
            dead = distance == 0
            distance.masked_fill_(dead, 1).log_()
            count = (~dead).sum().float()
        sums.append(torch.stack([distance.sum(dtype=torch.float32).to(device), count.to(device)]))
    distance, count = total(sums, owners).sum(0)
    if rule == "arithmetic":
        return distance / count
    return (distance / count.clamp(min=1)).exp()


def _mean_logs(variances: list[Tensor], owners: list[Tensor]) -> Tensor:
    """Of each, the mean log of its entries that are not 0, on all processes; 0 without any: fp32 `[n]` on the CPU."""
    sums = []
    for variance in variances:
        live = variance != 0
        logs = torch.where(live, variance, 1).float().log_()
        sums.append(torch.stack([logs.sum(), live.sum().float()]).to(variances[0].device))
    summed, count = total(sums, owners).unbind(1)
    return (summed / count.clamp(min=1)).cpu()
