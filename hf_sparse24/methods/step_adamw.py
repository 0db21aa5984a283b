"""StepAdamW, the optimizer of STEP: AdamW that freezes the variance of masked weights once it has settled."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..weights.sharding import total
from .masked_adamw import Group, GroupTensors, MaskedAdamW
from .settings import to_steps

SWITCH_RULES = ("arithmetic", "geometric")


class StepAdamW(MaskedAdamW):
    """AdamW in two phases: `torch.optim.AdamW` until AutoSwitch fires, then with a frozen variance v*.

    With m and v Adam's moments and hats for bias correction, a masked parameter is updated by

        phase 1     w <- w - lr weight_decay w - lr m^ / (sqrt(v^) + eps)
        phase 2     w <- w - lr weight_decay w - lr clip(m^ / (sqrt(v*) + eps)),    v* = v^ of the last step of phase 1

    where clip limits each entry to [-update_clip, update_clip]. STEP's masks begin with phase 2.

    AutoSwitch ends phase 1 with the first step t >= `switch_after` at which v has settled, at the latest with step
    `switch_by`. v has settled once the mean of z over the last `floor(1 / (1 - beta2))` steps, or those that there are,
    is below eps. z is a mean over all entries of all masked weights: of "arithmetic", the paper's option I,
    `z_t = mean |v_t - v_{t-1}|`; of "geometric", its option II, `z_t = exp(mean log |v_t - v_{t-1}|)` without the
    entries that did not change (if none did, z_t is 1 - beta2).

    Limits: v has the units of squared gradients, eps those of a gradient. So small gradients fulfil the rule at once,
    and large ones never do. A bf16 variance cannot fall where 1 - beta2 is below 0.004: keep the weights in fp32.

    Deviations from the paper: AdamW moves no entry by more than lr max(1, (1 - beta1) / sqrt(1 - beta2)) (Kingma and Ba
    2015, section 2.1), but a frozen v* does not limit steps, so we clip them. A Llama of 1.6M parameters, lr 6e-3,
    switched after 400 of 4,000 steps, went from loss 4.3 to 4.8 without the clip, and went on falling with it. v* keeps
    its bias correction; without it, steps would grow by 26 % after 1 / (1 - beta2) steps.

    Args:
        params: groups, those with `"masked": True` in both phases, the others plain AdamW; see `step_param_groups`.
        lr: as in `torch.optim.AdamW`.
        betas: as there; the masked groups must agree on them.
        eps: as there; the masked groups must agree on it.
        weight_decay: as there.
        total_steps: optimizer steps of the whole run, >= 2.
        switch_rule: `"arithmetic"` or `"geometric"`.
        switch_after: length of training before which AutoSwitch never switches, in steps or, below 1, as a fraction.
        switch_by: length of training at which it switches in any case, in the same units.
        update_clip: limit of an entry's step in phase 2, in learning rates; 0, as in the paper, limits nothing.

    Raises:
        ValueError: a value out of its range, masked groups that disagree, or the state of another optimizer or rule.
        RuntimeError: a masked parameter gets its first gradient in phase 2, too late to learn a variance.

    Attributes:
        arguments: the last five arguments by name, lengths in optimizer steps; the run and its config must agree.

    Examples:
        >>> from transformers import AutoConfig, AutoModelForCausalLM
        >>> model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("gpt2"))
        >>> _ = patch_model(model, Sparse24Config(method="step"))
        >>> optimizer = StepAdamW(step_param_groups(model), lr=1e-4, total_steps=1000)
        >>> optimizer.switched, optimizer.switch_threshold
        (False, 1e-08)
    """

    def __init__(
        self,
        params: Iterable[Group],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        total_steps: int,
        switch_rule: str = "arithmetic",
        switch_after: int | float = 0.1,
        switch_by: int | float = 0.5,
        update_clip: float = 1.0,
    ):
        if not 0 <= update_clip < math.inf:
            raise ValueError(f"update_clip={update_clip!r}: must be a finite number >= 0; 0 clips nothing")
        if switch_rule not in SWITCH_RULES:
            raise ValueError(f"switch_rule={switch_rule!r}: must be one of {list(SWITCH_RULES)}")
        after, by = to_steps(switch_after, total_steps), to_steps(switch_by, total_steps)
        if not (0 <= after <= by and 1 <= by < total_steps):
            given = f"switch_after={switch_after} is {after} steps, switch_by={switch_by} is {by}, {total_steps=}"
            raise ValueError(f"{given}: must have 0 <= switch_after <= switch_by and 1 <= switch_by < total_steps")
        super().__init__(params, lr, betas, eps, weight_decay)
        first, *others = [group for group in self.param_groups if group["masked"]]
        if any((group["betas"], group["eps"]) != (first["betas"], first["eps"]) for group in others):
            raise ValueError("masked groups differ in betas or eps; AutoSwitch decides for all of them at once")
        self.rule, self.after, self.by, self.clip = switch_rule, after, by, update_clip
        lengths = {"total_steps": total_steps, "switch_after": after, "switch_by": by}
        self.arguments = lengths | {"switch_rule": switch_rule, "update_clip": update_clip}
        # As long as v remembers. The small addition makes 20 of 1 / (1 - 0.95), which float noise puts below 20.
        window = torch.full((math.floor(1 / (1 - first["betas"][1]) + 1e-6),), math.inf)
        seen = {"step": 0, "switch_step": None, "rule": switch_rule, "window": window}
        first["auto_switch"] = seen | {"statistic": torch.tensor(math.inf)}

    @property
    def switched(self) -> bool:
        """Whether phase 2 has begun."""
        return self.switch_step is not None

    @property
    def switch_step(self) -> int | None:
        """Number of steps that phase 1 took; None while it lasts."""
        return self._first["auto_switch"]["switch_step"]

    @property
    def switch_statistic(self) -> float:
        """Last value of AutoSwitch's statistic; infinite while there is none."""
        return float(self._first["auto_switch"]["statistic"])

    @property
    def switch_threshold(self) -> float:
        """Value that the statistic must fall below for phase 2 to begin."""
        return self._first["eps"]

    @property
    def _first(self) -> Group:
        """The masked group that has AutoSwitch's state. Looked up each time: loading replaces the groups."""
        return next(group for group in self.param_groups if "auto_switch" in group)

    def before_groups(self, masked: list[GroupTensors]) -> None:
        """Write z of this step into the window, if any decision will read it."""
        new = [tuple(x.shape) for batch in masked for x, step in zip(batch.owners, batch.steps) if step == 0]
        if self.switched and new:
            way = "make it trainable from the start, or put it into a group that is not masked"
            when = f"after step {self.switch_step}, when variances were frozen"
            raise RuntimeError(f"a masked parameter of shape {new[0]} got its first gradient {when}; {way}")
        seen, beta2 = self._first["auto_switch"], self._first["betas"][1]
        step = seen["step"] = seen["step"] + 1
        if self.switched or not masked or step <= self.after - len(seen["window"]):
            return
        window = seen["window"] = seen["window"].to(masked[0].owners[0].device)
        # v_t - v_{t-1} = (1 - beta2) (g^2 - v_{t-1}), so that no copy of v is needed.
        window[step % len(window)] = (1 - beta2) * _mean_distance(masked, self.rule, window.device)
        is_seen = ~window.isinf()
        seen["statistic"] = torch.where(is_seen, window, 0.0).sum() / is_seen.sum()

    def masked_step(self, group: Group, batch: GroupTensors) -> None:
        if not self.switched:
            return super().masked_step(group, batch)
        lr, beta1 = float(group["lr"]), group["betas"][0]
        torch._foreach_add_(batch.steps, 1)
        torch._foreach_mul_(batch.params, 1 - lr * group["weight_decay"])
        torch._foreach_lerp_(batch.exp_avgs, batch.grads, 1 - beta1)
        denominators = torch._foreach_sqrt(batch.exp_avg_sqs)
        torch._foreach_add_(denominators, group["eps"])
        corrections = [1 - beta1 ** t.item() for t in batch.steps]
        if not self.clip:
            sizes = [-lr / correction for correction in corrections]
            return torch._foreach_addcdiv_(batch.params, batch.exp_avgs, denominators, sizes)
        torch._foreach_reciprocal_(denominators)  # in place from here on: the memory of one more moment
        torch._foreach_mul_(denominators, batch.exp_avgs)
        torch._foreach_div_(denominators, corrections)
        torch._foreach_clamp_max_(denominators, self.clip)
        torch._foreach_clamp_min_(denominators, -self.clip)
        torch._foreach_add_(batch.params, denominators, alpha=-lr)

    def after_groups(self) -> None:
        """Turn v of all masked parameters into v* in place if it has settled."""
        seen, beta2 = self._first["auto_switch"], self._first["betas"][1]
        step = seen["step"]
        if self.switched or not (step >= self.by or (step >= self.after and seen["statistic"] < self._first["eps"])):
            return
        seen["switch_step"] = step
        masked = [parameter for group in self.param_groups if group["masked"] for parameter in group["params"]]
        for state in (self.state[parameter] for parameter in masked if parameter in self.state):
            state["exp_avg_sq"].div_(1 - beta2 ** state["step"].item())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the `state_dict()` of a `StepAdamW` with the same groups and rule; ValueError for another."""
        rules = [group["auto_switch"].get("rule") for group in state_dict["param_groups"] if "auto_switch" in group]
        if rules != [self.rule]:
            raise ValueError(f"this is not the state of a StepAdamW with switch_rule={self.rule!r}: {rules=}")
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["step"] = state["step"].cpu()  # a checkpoint read onto a GPU has brought it there


def _mean_distance(masked: list[GroupTensors], rule: str, device: torch.device) -> Tensor:
    """z_t / (1 - beta2), from |g^2 - v| of all entries of all processes: an fp32 scalar on `device`."""
    sums = []
    # Not `torch._foreach_*`, which would hold the distances of all weights, and takes ten times as long on a CPU.
    for gradient, variance in (pair for batch in masked for pair in zip(batch.grads, batch.exp_avg_sqs)):
        distance = torch.addcmul(variance, gradient, gradient, value=-1).abs_()
        count = torch.tensor(float(distance.numel()))
        if rule == "geometric":
            dead = distance == 0
            distance.masked_fill_(dead, 1).log_()
            count = (~dead).sum().float()
        sums.append(torch.stack([distance.sum(dtype=torch.float32).to(device), count.to(device)]))
    distance, count = total(sums, [owner for batch in masked for owner in batch.owners]).sum(0)
    return distance / count if rule == "arithmetic" else (distance / count.clamp(min=1)).exp()
