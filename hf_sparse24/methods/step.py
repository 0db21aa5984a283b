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
                     it does not wait
    Deviations       Steps with v* are clipped, and v* keeps its bias correction (reasons in `StepAdamW`). The geometric
                     rule leaves out entries of v that did not change. A window that is not full yet is averaged as it
                     is. Weight decay is AdamW's, in both phases. Weights that are not pruned stay with plain AdamW
    Measured here    recipes/results/methods.md, on a small Llama
    Reference        Lu et al. 2023 (arXiv 2302.01172), Algorithms 1 and 2. There is no official code.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from .base import StepContext
from .masked_adamw import Group
from .registry import register_method
from .settings import LENGTH, GemmSettings, is_length, is_non_negative, one_of, setting, sparse_steps, to_steps
from .ste import STE
from .step_adamw import SWITCH_RULES, StepAdamW

_OPTIMIZER_SETTINGS = ("switch_rule", "switch_after", "switch_by", "update_clip")
_MAKER = "sparse_run(model).method.make_optimizer(step_param_groups(model), total_steps, lr=...)"


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
        if not _step_adamw(optimizer).switched:
            return "dense"
        return "sparse" if step in sparse_steps(total_steps, 0, self.settings.dense_tail) else "dense"

    def check_run(self, total_steps: int, optimizer: torch.optim.Optimizer) -> None:
        super().check_run(total_steps, optimizer)
        given = _step_adamw(optimizer).arguments
        ours = {"total_steps": total_steps} | {name: getattr(self.settings, name) for name in _OPTIMIZER_SETTINGS}
        ours |= {name: to_steps(ours[name], total_steps) for name in ("switch_after", "switch_by")}
        if wrong := [f"{name}={given[name]!r}, not {ours[name]!r}" for name in given if given[name] != ours[name]]:
            raise ValueError(f"StepAdamW has {', '.join(wrong)}, which the run and its config say: make it by {_MAKER}")

    def make_optimizer(self, groups: list[Group], total_steps: int, **arguments: Any) -> StepAdamW:
        arguments |= {name: getattr(self.settings, name) for name in _OPTIMIZER_SETTINGS}
        return StepAdamW(groups, total_steps=total_steps, **arguments)

    def metrics(self, context: StepContext) -> dict[str, float]:
        """`switch_statistic` and `switch_threshold` of AutoSwitch, from its first statistic to the switch."""
        optimizer = _step_adamw(context.optimizer)
        statistic = optimizer.switch_statistic
        if optimizer.switched or math.isinf(statistic):
            return {}
        return {"switch_statistic": statistic, "switch_threshold": optimizer.switch_threshold}


def _step_adamw(optimizer: torch.optim.Optimizer) -> StepAdamW:
    if not isinstance(optimizer, StepAdamW):
        name = type(optimizer).__name__
        raise ValueError(f"method 'step' is an optimizer as much as a mask, and {name} is not it: make it by {_MAKER}")
    return optimizer
