"""StepAdamW, the optimizer of STEP: AdamW that freezes the variance of masked weights once it has settled."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .auto_switch import AutoSwitch
from .masked_adamw import GroupTensors, MaskedAdamW, adamw_step


class StepAdamW(MaskedAdamW):
    """AdamW in two phases: `torch.optim.AdamW` until AutoSwitch fires, then with a frozen variance v*.

    With m and v Adam's moments and hats for bias correction, a masked parameter is updated by

        phase 1     w <- w - lr weight_decay w - lr m^ / (sqrt(v^) + eps)
        phase 2     w <- w - lr weight_decay w - lr clip(m^ / (sqrt(v*) + eps)),    v* = v^ of the last step of phase 1

    where clip limits each entry to [-update_clip, update_clip]. Phase 1 ends with the first step t >= `switch_after` at
    which `AutoSwitch` finds v settled, at the latest with step `switch_by`. STEP's masks begin with the next step.

    Args:
        params: parameter groups. Those with `"masked": True` take part in AutoSwitch and in phase 2; all others are
            plain AdamW throughout. `step_param_groups` makes the groups of a patched model.
        lr: as in `torch.optim.AdamW`.
        betas: as there; the masked groups must agree on them.
        eps: as there; the masked groups must agree on it. The paper's two rules compare with it.
        weight_decay: as there.
        total_steps: optimizer steps of the whole run, >= 2.
        switch_rule: the paper's `"arithmetic"` (option I) or `"geometric"` (option II); see `AutoSwitch`.
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
        >>> from transformers import AutoModelForCausalLM
        >>> model = AutoModelForCausalLM.from_pretrained("gpt2")
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
        self.update_clip = update_clip
        super().__init__(params, lr, betas, eps, weight_decay)
        masked = [group for group in self.param_groups if group["masked"]]
        if any((group["betas"], group["eps"]) != (masked[0]["betas"], masked[0]["eps"]) for group in masked):
            raise ValueError("masked groups differ in betas or eps; AutoSwitch decides for all of them at once")
        self._make_rule = partial(AutoSwitch, switch_rule, total_steps, switch_after, switch_by)
        self._rule = self._make_rule(beta2=masked[0]["betas"][1], eps=masked[0]["eps"])
        masked[0]["auto_switch"] = {"step": 0, "switch_step": None} | self._rule.nothing_seen(self._masked[0].device)

    @property
    def switched(self) -> bool:
        """Whether phase 2 has begun."""
        return self.switch_step is not None

    @property
    def switch_step(self) -> int | None:
        """Number of steps that phase 1 took; None while it lasts."""
        return self._auto_switch["switch_step"]

    @property
    def switch_statistic(self) -> float:
        """Last value of AutoSwitch's statistic; infinite while there is none."""
        return float(self._auto_switch["statistic"])

    @property
    def switch_threshold(self) -> float:
        """Value that the statistic must fall below for phase 2 to begin."""
        return self._rule.threshold

    @property
    def _masked(self) -> list[Tensor]:
        return [parameter for group in self.param_groups if group["masked"] for parameter in group["params"]]

    @property
    def _auto_switch(self) -> dict[str, Any]:
        # Looked up each time: loading replaces the groups.
        return next(group["auto_switch"] for group in self.param_groups if "auto_switch" in group)

    def before_groups(self, masked: list[GroupTensors]) -> None:
        step = self._auto_switch["step"] = self._auto_switch["step"] + 1
        if not self.switched:
            gradients, variances, owners = ([x for batch in masked for x in batch[i]] for i in (1, 3, 5))
            self._rule.before_step(self._auto_switch, step, gradients, variances, owners)

    def masked_step(self, group: dict[str, Any], batch: GroupTensors) -> None:
        if self.switched:
            _frozen_step(group, batch, self.update_clip)
        else:
            adamw_step(group, batch)

    def after_groups(self) -> None:
        """Turn v of all masked parameters into v* in place if it has settled."""
        step = self._auto_switch["step"]
        if not self.switched and self._rule.has_settled(self._auto_switch, step):
            self._auto_switch["switch_step"] = step
            states = [self.state[parameter] for parameter in self._masked if parameter in self.state]
            if states:
                corrections = [1 - self._rule.beta2 ** state["step"].item() for state in states]
                torch._foreach_div_([state["exp_avg_sq"] for state in states], corrections)

    def check_new(self, parameter: Tensor) -> None:
        if self.switched:
            raise RuntimeError(
                f"a masked parameter of shape {tuple(parameter.shape)} got its first gradient after step "
                f"{self.switch_step}, when variances were frozen; make it trainable from the start, or put it into a "
                f"group that is not masked"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the `state_dict()` of a `StepAdamW` with the same groups.

        Raises:
            ValueError: the state of another optimizer, or of other groups.
        """
        if not any("auto_switch" in group for group in state_dict["param_groups"]):
            raise ValueError("this is not the state of a StepAdamW: it does not say whether the variance is frozen")
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["step"] = state["step"].cpu()  # a checkpoint read onto a GPU has brought it there
        masked = next(group for group in self.param_groups if group["masked"])
        self._rule = self._make_rule(beta2=masked["betas"][1], eps=masked["eps"])  # loading may change them
        self._rule.resume(self._auto_switch)


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
