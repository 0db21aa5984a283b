"""StepAdamW, the optimizer of STEP: AdamW that freezes the variance of masked weights once it has settled."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..weights.sharding import total
from .masked_adamw import GroupTensors, MaskedAdamW, adamw_step
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
    is below eps. z is a mean over all entries of all masked weights, by one of the paper's two rules:

    * "arithmetic", option I: `z_t = mean |v_t - v_{t-1}|`.
    * "geometric", option II: `z_t = exp(mean log |v_t - v_{t-1}|)`, without the entries that did not change: one would
      make it zero. If none changed, z_t is 1 - beta2.

    Limits: v has the units of squared gradients, eps those of a gradient. So small gradients fulfil the rule at once,
    and large ones never do. A bf16 variance cannot fall where 1 - beta2 is below 0.004, and looks settled: keep the
    weights in fp32.

    Args:
        params: parameter groups. Those with `"masked": True` take part in AutoSwitch and in phase 2; all others are
            plain AdamW throughout. `step_param_groups` makes the groups of a patched model.
        lr: as in `torch.optim.AdamW`.
        betas: as there; the masked groups must agree on them.
        eps: as there; the masked groups must agree on it. The paper's two rules compare with it.
        weight_decay: as there.
        total_steps: optimizer steps of the whole run, >= 2.
        switch_rule: `"arithmetic"` or `"geometric"`.
        switch_after: length of training before which AutoSwitch never switches: an int counts optimizer steps, a float
            below 1 is a fraction of `total_steps`.
        switch_by: length of training at which it switches in any case, in the same units.
        update_clip: limit of an entry's step in phase 2, in learning rates and without weight decay; 0, as in the
            paper, limits nothing.

    Raises:
        ValueError: a value out of its range, no masked group, masked groups that disagree; when loading, the state of
            another optimizer.
        RuntimeError: a masked parameter gets its first gradient in phase 2, when it is too late to learn a variance.

    `state_dict()` holds everything, AutoSwitch included (in the first masked group), so a resumed run equals an
    uninterrupted one. Memory is AdamW's and AutoSwitch's window. Between `switch_after` and the switch each step reads
    one number from the device. Each process updates its shards (FSDP2, tensor parallelism); means are over all shards,
    so all processes switch at the same step.

    Reference: Lu et al. 2023 (arXiv 2302.01172), Algorithms 1 and 2; no official code exists. Deviations:

    * The clip. AdamW moves no entry by more than lr max(1, (1 - beta1) / sqrt(1 - beta2)), because v follows the
      gradient (Kingma and Ba 2015, section 2.1). A frozen v* does not: when gradients grow, entries with a small v*
      take many times that step. On a Llama of 1.6M parameters, lr 6e-3, switched after 400 of 4,000 steps, the loss
      rose from 4.3 to 4.8; clipped, it went on falling. The clip also limits an entry without a gradient in phase 1.
    * v* keeps the bias correction it had when it was frozen. Without it, steps would grow by 26 % after
      1 / (1 - beta2) steps.

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
        params: Iterable[dict[str, Any]],
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
        masked = [group for group in self.param_groups if group["masked"]]
        if any((group["betas"], group["eps"]) != (masked[0]["betas"], masked[0]["eps"]) for group in masked):
            raise ValueError("masked groups differ in betas or eps; AutoSwitch decides for all of them at once")
        self.update_clip, self._switch_rule, self._after, self._by = update_clip, switch_rule, after, by
        lengths = {"total_steps": total_steps, "switch_after": after, "switch_by": by}
        self.arguments = lengths | {"switch_rule": switch_rule, "update_clip": update_clip}
        """What the run and its config must agree with, by the argument's name: lengths in optimizer steps."""
        masked[0]["auto_switch"] = {"step": 0, "switch_step": None} | self._nothing_seen(masked[0])

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
    def _first(self) -> dict[str, Any]:
        """The masked group that has AutoSwitch's state. Looked up each time: loading replaces the groups."""
        return next(group for group in self.param_groups if "auto_switch" in group)

    def _nothing_seen(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return AutoSwitch's state before the first step: an empty `window` of z, and no statistic."""
        # How long v remembers. The small addition makes 20 of 1 / (1 - 0.95), which float noise puts below 20.
        window = torch.full((math.floor(1 / (1 - group["betas"][1]) + 1e-6),), math.inf)
        return {"rule": self._switch_rule, "window": window, "statistic": torch.tensor(math.inf)}

    def before_groups(self, masked: list[GroupTensors]) -> None:
        """Write z of this step into the window, if any decision will read it."""
        seen, beta2 = self._first["auto_switch"], self._first["betas"][1]
        step = seen["step"] = seen["step"] + 1
        gradients, variances, owners = ([x for batch in masked for x in batch[i]] for i in (1, 3, 5))
        if self.switched or not owners or step <= self._after - len(seen["window"]):
            return
        window = seen["window"] = seen["window"].to(owners[0].device)
        # v_t - v_{t-1} = (1 - beta2) (g^2 - v_{t-1}), so that no copy of v is needed.
        distance = _mean_distance(gradients, variances, owners, self._switch_rule, window.device)
        window[step % len(window)] = (1 - beta2) * distance
        is_seen = ~window.isinf()
        seen["statistic"] = torch.where(is_seen, window, 0.0).sum() / is_seen.sum()

    def masked_step(self, group: dict[str, Any], batch: GroupTensors) -> None:
        if self.switched:
            _frozen_step(group, batch, self.update_clip)
        else:
            adamw_step(group, batch)

    def after_groups(self) -> None:
        """Turn v of all masked parameters into v* in place if it has settled."""
        seen, beta2 = self._first["auto_switch"], self._first["betas"][1]
        step = seen["step"]
        if self.switched or not (step >= self._by or (step >= self._after and seen["statistic"] < self._first["eps"])):
            return
        seen["switch_step"] = step
        masked = [parameter for group in self.param_groups if group["masked"] for parameter in group["params"]]
        states = [self.state[parameter] for parameter in masked if parameter in self.state]
        if states:
            corrections = [1 - beta2 ** state["step"].item() for state in states]
            torch._foreach_div_([state["exp_avg_sq"] for state in states], corrections)

    def check_new(self, parameter: Tensor) -> None:
        if self.switched:
            shape, step = tuple(parameter.shape), self.switch_step
            way = "make it trainable from the start, or put it into a group that is not masked"
            when = f"after step {step}, when variances were frozen"
            raise RuntimeError(f"a masked parameter of shape {shape} got its first gradient {when}; {way}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the `state_dict()` of a `StepAdamW` with the same groups; ValueError for another."""
        if not any("auto_switch" in group for group in state_dict["param_groups"]):
            raise ValueError("this is not the state of a StepAdamW: it does not say whether the variance is frozen")
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["step"] = state["step"].cpu()  # a checkpoint read onto a GPU has brought it there
        # Loading may change beta2. What another rule, or another window, has seen is forgotten.
        seen, fresh = self._first["auto_switch"], self._nothing_seen(self._first)
        if seen.get("rule") != self._switch_rule or seen["window"].shape != fresh["window"].shape:
            seen.update(fresh)


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


def _frozen_step(group: dict[str, Any], batch: GroupTensors, update_clip: float) -> None:
    """Take a step of phase 2: AdamW's with the frozen variance in `exp_avg_sq`, clipped."""
    lr, beta1 = float(group["lr"]), group["betas"][0]
    torch._foreach_add_(batch.steps, 1)
    torch._foreach_mul_(batch.params, 1 - lr * group["weight_decay"])
    torch._foreach_lerp_(batch.exp_avgs, batch.grads, 1 - beta1)
    denominators = torch._foreach_sqrt(batch.exp_avg_sqs)
    torch._foreach_add_(denominators, group["eps"])
    corrections = [1 - beta1 ** t.item() for t in batch.steps]
    if update_clip:
        torch._foreach_reciprocal_(denominators)  # in place from here on: the memory of one more moment
        torch._foreach_mul_(denominators, batch.exp_avgs)
        torch._foreach_div_(denominators, corrections)
        torch._foreach_clamp_max_(denominators, update_clip)
        torch._foreach_clamp_min_(denominators, -update_clip)
        torch._foreach_add_(batch.params, denominators, alpha=-lr)
    else:
        step_sizes = [-lr / correction for correction in corrections]
        torch._foreach_addcdiv_(batch.params, batch.exp_avgs, denominators, step_sizes)
