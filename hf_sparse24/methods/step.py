"""STEP: dense at first, until Adam's second moment can be trusted; then 2:4 with that moment frozen.

Method card
    Precondition     dense training with Adam, until AutoSwitch finds the variance v reliable
    Mask learning    STE with an N:M magnitude mask, updates w <- w - lr clip(m^ / (sqrt(v*) + eps)), v* frozen
    Why              SR-STE loses accuracy with Adam because v is then estimated from masked weights' gradients
    Hyper-parameters switch_rule "arithmetic" (option I) or "geometric" (option II), logged as `switch_statistic` and
                     `switch_threshold`; not before 10 % (`switch_after`) and by 50 % (`switch_by`) of training;
                     update_clip 1.0, 0 for the paper's steps
    Optimizer        `StepAdamW`, which has the formulas. `Sparse24Trainer` makes it from these settings; in a loop of
                     your own `sparse_run(model).method.make_optimizer(step_param_groups(model), total_steps, lr=...)`
                     does. The controller refuses one with other settings
    Known limits     the dense phase has no sparse GEMM, so at most 90 % of the run can gain. AutoSwitch compares
                     squared gradients with eps: where they are large it waits until `switch_by`, where they are small
                     it does not wait. A bf16 variance cannot fall where 1 - beta2 is below 0.004: keep weights in fp32
    Deviations       Steps with v* are clipped, and v* keeps its bias correction (reasons in `StepAdamW`). The geometric
                     rule leaves out entries of v that did not change. Weight decay is AdamW's, in both phases. Weights
                     that are not pruned stay with plain AdamW
    Measured here    recipes/results/methods.md, on a small Llama
    Reference        Lu et al. 2023 (arXiv 2302.01172), Algorithms 1 and 2. There is no official code.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..weights.sharding import total
from .base import StepContext
from .masked_adamw import Group, GroupTensors, MaskedAdamW
from .registry import register_method
from .settings import LENGTH, GemmSettings, is_length, is_non_negative, one_of, setting, sparse_steps, to_steps
from .ste import STE

SWITCH_RULES = ("arithmetic", "geometric")
_OPTIMIZER_SETTINGS = ("switch_rule", "switch_after", "switch_by", "update_clip")
_MAKER = "sparse_run(model).method.make_optimizer(step_param_groups(model), total_steps, lr=...)"


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
        >>> weight = torch.nn.Parameter(torch.ones(4, 4))
        >>> StepAdamW([{"params": [weight], "masked": True}], total_steps=1000).switched
        False
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
        rule, after, by = switch_rule, switch_after, switch_by
        settings = STEP.Settings(switch_rule=rule, switch_after=after, switch_by=by, update_clip=update_clip)
        self.arguments = _optimizer_arguments(settings, total_steps)
        self.rule, self.after, self.by, self.clip = (self.arguments[name] for name in _OPTIMIZER_SETTINGS)
        if not max(self.after, 1) <= self.by < total_steps:
            given = f"switch_after={after} is {self.after} steps, switch_by={by} is {self.by}, {total_steps=}"
            raise ValueError(f"{given}: must have switch_after <= switch_by and 1 <= switch_by < total_steps")
        super().__init__(params, lr, betas, eps, weight_decay)
        first, *others = [group for group in self.param_groups if group["masked"]]
        if any((group["betas"], group["eps"]) != (first["betas"], first["eps"]) for group in others):
            raise ValueError("masked groups differ in betas or eps; AutoSwitch decides for all of them at once")
        # As long as v remembers. The small addition makes 20 of 1 / (1 - 0.95), which float noise puts below 20.
        length = math.floor(1 / (1 - first["betas"][1]) + 1e-6)
        window = torch.full((length,), math.inf, dtype=torch.float32, device="cpu")
        seen = {"step": 0, "switch_step": None, "rule": switch_rule, "window": window}
        first["auto_switch"] = seen | {"statistic": torch.tensor(math.inf, device="cpu")}

    @property
    def switched(self) -> bool:
        """Whether phase 2 has begun."""
        return self.switch_step is not None

    @property
    def switch_step(self) -> int | None:
        """Number of steps that phase 1 took; None while it lasts."""
        return self.first["auto_switch"]["switch_step"]

    @property
    def first(self) -> Group:
        """The masked group that has AutoSwitch's state. Looked up each time: loading replaces the groups."""
        return next(group for group in self.param_groups if "auto_switch" in group)

    def before_groups(self, masked: list[GroupTensors]) -> None:
        """Write z of this step into the window, if any decision will read it."""
        new = [tuple(x.shape) for batch in masked for x, step in zip(batch.owners, batch.steps) if step == 0]
        if self.switched and new:
            when = f"after step {self.switch_step}, when variances were frozen; make it trainable from the start"
            raise RuntimeError(f"a masked parameter of shape {new[0]} got its first gradient {when}")
        seen, beta2 = self.first["auto_switch"], self.first["betas"][1]
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
        seen, beta2 = self.first["auto_switch"], self.first["betas"][1]
        step = seen["step"]
        if self.switched or not (step >= self.by or (step >= self.after and seen["statistic"] < self.first["eps"])):
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
        count = torch.tensor(distance.numel(), dtype=torch.float32, device=distance.device)
        if rule == "geometric":
            dead = distance == 0
            distance.masked_fill_(dead, 1).log_()
            count = (~dead).sum().float()
        sums.append(torch.stack([distance.sum(dtype=torch.float32).to(device), count.to(device)]))
    distance, count = total(sums, [owner for batch in masked for owner in batch.owners]).sum(0)
    return distance / count if rule == "arithmetic" else (distance / count.clamp(min=1)).exp()


@register_method("step")
class STEP(STE):
    @dataclass(frozen=True, kw_only=True)
    class Settings(GemmSettings):
        switch_rule: str = setting(
            "arithmetic",
            one_of(*SWITCH_RULES),
            "when AutoSwitch takes Adam's variance for settled, so that sparsity begins and the variance freezes: once "
            "the 'arithmetic' or the 'geometric' mean of its changes (the paper's options I and II), averaged over the "
            "last 1 / (1 - beta2) steps, is below eps",
        )
        switch_after: int | float = setting(
            0.1, is_length, f"length of training before which AutoSwitch never switches: {LENGTH}"
        )
        switch_by: int | float = setting(
            0.5, is_length, f"length of training at which it switches in any case: {LENGTH}"
        )
        update_clip: float = setting(
            1.0, is_non_negative, "longest step of an entry while the variance is frozen, in learning rates; 0: any"
        )
        dense_tail: int | float = setting(0, is_length, f"length of dense training after sparsity ends: {LENGTH}")

    def schedule(self, total_steps: int) -> range:
        """The steps that are sparse at least: sparsity starts with `switch_by` or before."""
        return sparse_steps(total_steps, self.settings.switch_by, self.settings.dense_tail, "switch_by")

    def phase(self, step: int, total_steps: int, optimizer: torch.optim.Optimizer) -> str:
        """Dense before the optimizer has switched."""
        sparse = sparse_steps(total_steps, 0, self.settings.dense_tail)
        return "sparse" if _step_adamw(optimizer).switched and step in sparse else "dense"

    def check_run(self, total_steps: int, optimizer: torch.optim.Optimizer) -> None:
        super().check_run(total_steps, optimizer)
        given, ours = _step_adamw(optimizer).arguments, _optimizer_arguments(self.settings, total_steps)
        if wrong := [f"{name}={given[name]!r}, not {ours[name]!r}" for name in given if given[name] != ours[name]]:
            raise ValueError(f"StepAdamW has {', '.join(wrong)}, which the run and its config say: make it by {_MAKER}")

    def make_optimizer(self, groups: list[Group], total_steps: int, **arguments: Any) -> StepAdamW:
        return StepAdamW(groups, **arguments, **_optimizer_arguments(self.settings, total_steps))

    def metrics(self, context: StepContext) -> dict[str, float]:
        """`switch_statistic` and `switch_threshold` of AutoSwitch, from its first statistic to the switch."""
        first = _step_adamw(context.optimizer).first
        statistic = float(first["auto_switch"]["statistic"])
        if first["auto_switch"]["switch_step"] is not None or math.isinf(statistic):
            return {}
        return {"switch_statistic": statistic, "switch_threshold": first["eps"]}


def _step_adamw(optimizer: torch.optim.Optimizer) -> StepAdamW:
    if not isinstance(optimizer, StepAdamW):
        name = type(optimizer).__name__
        raise ValueError(f"method 'step' is an optimizer as much as a mask, and {name} is not it: make it by {_MAKER}")
    return optimizer


def _optimizer_arguments(settings: "STEP.Settings", total_steps: int) -> dict[str, Any]:
    """What the optimizer and its method must agree on, lengths in optimizer steps."""
    values = {name: getattr(settings, name) for name in _OPTIMIZER_SETTINGS}
    lengths = {name: to_steps(values[name], total_steps) for name in ("switch_after", "switch_by")}
    return values | lengths | {"total_steps": total_steps}
