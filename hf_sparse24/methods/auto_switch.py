"""AutoSwitch decides when Adam's variance v has settled, so that STEP may freeze it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..weights.sharding import local, total
from .schedule import to_steps

SWITCH_RULES = ("drift", "arithmetic", "geometric")
DRIFT = 0.1
_WINDOWS = 20  # of "drift" in a run


class AutoSwitch:
    """Compares a statistic of v with a threshold, by one of three rules.

    * "drift", ours: how much the variance of a weight grew or shrank from one window of the run to the next, `|mean log
      v - mean log v of the window before|` over its entries and the steps of the window, averaged over all weights;
      settled below 0.1. A window is a twentieth of the run, in multiples of `floor(1 / (1 - beta2))` steps, and two are
      needed: with Adam's default beta2 of 0.999, runs of less than 4,000 steps switch at `switch_by`.
    * "arithmetic", the paper's option I: `z_t = mean |v_t - v_{t-1}|` over all entries of all weights, averaged over
      the last `floor(1 / (1 - beta2))` steps; settled below Adam's eps.
    * "geometric", option II: the same with `z_t = exp(mean log |v_t - v_{t-1}|)`.

    The paper's rules compare a change of v, which has the units of squared gradients, with eps, which has those of a
    gradient: small gradients fulfil them at once, large ones never. The ratio of v and an earlier v has no units. A few
    large entries dominate the mean of v; the mean of log v sees all entries. It is averaged over a window because v
    forgets within `1 / (1 - beta2)` steps, so that each batch moves it.

    The geometric mean leaves out entries with v_t = v_{t-1} exactly: one dead entry would make it zero, and so switch
    at `switch_after`. If every entry is dead, z_t is 1 - beta2. Less than a full window of z decides nothing.

    In bfloat16 a variance cannot fall where 1 - beta2 is below 0.004, and looks settled: keep the weights in fp32.

    The optimizer saves what AutoSwitch has seen, a dict. Its `window` has z of the last steps; or, for each weight, the
    sum of mean log v in this window and its mean in the one before. What has not been seen is inf, and then so is the
    statistic.

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
        # How long v remembers. The small addition makes 20 of 1 / (1 - 0.95), which float noise puts below 20.
        self.memory = math.floor(1 / (1 - beta2) + 1e-6)
        self.threshold = DRIFT if rule == "drift" else eps
        self.window = self.memory * max(1, round(total_steps / _WINDOWS / self.memory))

    def nothing_seen(self, weights: Sequence[Tensor]) -> dict[str, Any]:
        """Return the dict of what was seen before the first step: nothing."""
        if self.rule == "drift":
            window = torch.full((2, len(weights)), math.inf)
        else:
            window = torch.full((self.memory,), math.inf, device=weights[0].device)
        made_by = [self.rule, self.memory, self.window]
        return {"made_by": made_by, "window": window, "statistic": torch.tensor(math.inf)}

    def resume(self, seen: dict[str, Any], weights: Sequence[Tensor]) -> None:
        """Keep what was saved if the same rule made it with the same windows, and start anew otherwise."""
        fresh = self.nothing_seen(weights)
        if "made_by" not in seen and self.rule != "drift":  # version 0.1, which had the paper's rules alone
            seen |= {"made_by": fresh["made_by"], "statistic": seen["window"].mean()}
        if seen.get("made_by") != fresh["made_by"] or seen["window"].shape != fresh["window"].shape:
            seen.update(fresh)

    def before_step(
        self, seen: dict[str, Any], step: int, gradients: list[Tensor], variances: list[Tensor], owners: list[Tensor]
    ) -> None:
        """Write z of step `step` into the window for the paper's rules, if any decision will read it.

        Args:
            gradients, variances: this process's shards of those of the parameters `owners`.
        """
        if self.rule == "drift" or step <= self.after - self.memory or not owners:
            return
        seen["window"] = window = seen["window"].to(owners[0].device)
        # v_t - v_{t-1} = (1 - beta2) (g^2 - v_{t-1}), so that no copy of v is needed.
        distance = _mean_distance(gradients, variances, owners, self.rule, window.device)
        window[step % self.memory] = (1 - self.beta2) * distance
        seen["statistic"] = window.mean()

    def after_step(
        self, seen: dict[str, Any], step: int, weights: Sequence[Tensor], states: Mapping[Tensor, dict[str, Any]]
    ) -> None:
        """Sample mean log v for the rule "drift", and compare windows at the end of one.

        Weights that never had a gradient have no state, and are left out.
        """
        if self.rule != "drift" or step % self.memory:
            return
        if seen["window"].shape[1] != len(weights):  # a group was added
            seen.update(self.nothing_seen(weights))
        known = [index for index, weight in enumerate(weights) if weight in states]
        logs = torch.full((len(weights),), math.inf)
        if known:
            logs[known] = _mean_logs([weights[index] for index in known], states, self.beta2)
        summed, last = seen["window"].cpu()
        starts = (step - self.memory) % self.window == 0
        summed = logs if starts else summed + logs
        if step % self.window == 0:
            mean = summed * (self.memory / self.window)
            changes = torch.where(last.isinf(), math.inf, (mean - last).abs())[known]
            seen["statistic"] = changes.mean() if known else torch.tensor(math.inf)
            last = mean
        seen["window"] = torch.stack([summed, last])

    def has_settled(self, seen: dict[str, Any], step: int) -> bool:
        """Return whether v may be frozen after step `step`."""
        return step >= self.by or (step >= self.after and bool(seen["statistic"] < self.threshold))


def _mean_distance(
    gradients: list[Tensor], variances: list[Tensor], owners: list[Tensor], rule: str, device: torch.device
) -> Tensor:
    """Return the mean of |g^2 - v| over all entries of all processes, z_t / (1 - beta2): an fp32 scalar on `device`."""
    sums = []
    # Not `torch._foreach_*`, which would hold the distances of all weights, and takes ten times as long on a CPU.
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


def _mean_logs(owners: list[Tensor], states: Mapping[Tensor, dict[str, Any]], beta2: float) -> Tensor:
    """Return the mean log of the non-zero entries, of all processes, of each bias-corrected variance: fp32 `[n]`, CPU.

    A variance that is all zeros has 0.
    """
    sums = []
    for owner in owners:
        variance = local(states[owner]["exp_avg_sq"])
        live = variance != 0
        logs = torch.where(live, variance, 1).float().log_()
        sums.append(torch.stack([logs.sum(), live.sum().float()]).cpu())
    summed, count = total(sums, owners).unbind(1)
    bias = torch.tensor([1 - beta2 ** states[owner]["step"].item() for owner in owners])
    return torch.where(count > 0, summed / count - bias.log(), 0.0)
