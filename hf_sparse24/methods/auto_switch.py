"""AutoSwitch decides when Adam's variance v has settled, so that STEP may freeze it."""

import math
from typing import Any

import torch
from torch import Tensor

from ..weights.sharding import total
from .schedule import to_steps

SWITCH_RULES = ("arithmetic", "geometric")


class AutoSwitch:
    """Compares how much v changes in a step with Adam's eps, by one of the paper's two rules.

    * "arithmetic", option I: `z_t = mean |v_t - v_{t-1}|` over all entries of all weights.
    * "geometric", option II: `z_t = exp(mean log |v_t - v_{t-1}|)`.

    v has settled once the mean of z over the last `floor(1 / (1 - beta2))` steps is below eps; at the beginning the
    mean is over fewer steps. Limits:

    * v has the units of squared gradients, eps those of a gradient. So small gradients fulfil the rule at once, and
      large ones never do: then the switch comes at `switch_by`.
    * The geometric mean leaves out entries with v_t = v_{t-1}: one dead entry would make it zero. If all are dead, z_t
      is 1 - beta2.
    * A bf16 variance cannot fall where 1 - beta2 is below 0.004, and looks settled. Keep the weights in fp32.

    The optimizer saves the dict of what AutoSwitch has seen. `window` has z of the last steps, inf where unseen.

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
        self.rule, self.beta2, self.threshold = rule, beta2, eps
        self.after, self.by = to_steps(switch_after, total_steps), to_steps(switch_by, total_steps)
        if not (0 <= self.after <= self.by and 1 <= self.by < total_steps):
            raise ValueError(
                f"switch_after={switch_after} is {self.after} steps, switch_by={switch_by} is {self.by}, "
                f"total_steps={total_steps}: must have 0 <= switch_after <= switch_by and 1 <= switch_by < total_steps"
            )
        # How long v remembers. The small addition makes 20 of 1 / (1 - 0.95), which float noise puts below 20.
        self.memory = math.floor(1 / (1 - beta2) + 1e-6)

    def nothing_seen(self, device: torch.device) -> dict[str, Any]:
        """Return the dict of what was seen before the first step: nothing."""
        window = torch.full((self.memory,), math.inf, device=device)
        return {"rule": self.rule, "window": window, "statistic": torch.tensor(math.inf)}

    def resume(self, seen: dict[str, Any]) -> None:
        """Keep what was saved if the same rule made it with the same window; otherwise forget it."""
        fresh = self.nothing_seen(seen["window"].device)
        if seen.get("rule") != self.rule or seen["window"].shape != fresh["window"].shape:
            seen.update(fresh)

    def before_step(
        self, seen: dict[str, Any], step: int, gradients: list[Tensor], variances: list[Tensor], owners: list[Tensor]
    ) -> None:
        """Write z of step `step` into the window, if any decision will read it.

        Args:
            gradients, variances: this process's shards of those of the parameters `owners`.
        """
        if step <= self.after - self.memory or not owners:
            return
        seen["window"] = window = seen["window"].to(owners[0].device)
        # v_t - v_{t-1} = (1 - beta2) (g^2 - v_{t-1}), so that no copy of v is needed.
        distance = _mean_distance(gradients, variances, owners, self.rule, window.device)
        window[step % self.memory] = (1 - self.beta2) * distance
        is_seen = ~window.isinf()
        seen["statistic"] = torch.where(is_seen, window, 0.0).sum() / is_seen.sum()

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
