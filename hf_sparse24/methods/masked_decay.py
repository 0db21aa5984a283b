"""Masked decay, the pull of pruned weights towards zero, for the methods that use it.

    g <- g + lambda_W (1 - mask) W        once per optimizer step, on the clipped, unscaled gradient

Hu et al. 2024 (arXiv 2404.01847), section 4.2, eq. (10); the regulariser is SR-STE's (arXiv 2102.04010), eq. (7).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from sparse24_kernels.decay import foreach_masked_decay_
from torch import Tensor

from ..sharding import local, local_gradient
from ..weight import SparseWeight, first_of_each
from .base import SparseMethod, StepContext
from .settings import MethodSettings, is_non_negative, one_of, setting

AUTO = "auto"


def is_decay(value: Any) -> str | None:
    return None if value == AUTO else is_non_negative(value)


@dataclass(frozen=True, kw_only=True)
class MaskedDecaySettings(MethodSettings):
    """How strongly pruned weights are pulled towards zero, and by what.

    Attributes:
        masked_decay: the strength, lambda_W.
        decay_on: whether it acts through the gradient or on the weight itself.
    """

    masked_decay: float | str = setting(
        2e-4,
        is_decay,
        "lambda_W >= 0, the pull of pruned weights towards zero, once per optimizer step; 'auto' lets Sparse24Trainer "
        "find it before training, by short probes of the first steps",
    )
    decay_on: str = setting(
        "gradient",
        one_of("gradient", "weight"),
        "'gradient' adds lambda_W * weight to the pruned weights' gradient (Hu et al. 2024); 'weight' takes "
        "lr * lambda_W * weight off the pruned weights themselves, past Adam's normalisation",
    )


class MaskedDecayMethod(SparseMethod):
    """A method whose settings include `MaskedDecaySettings`."""

    def check_run(self, total_steps: int, optimizer: torch.optim.Optimizer) -> None:
        if self.settings.masked_decay == AUTO:
            raise ValueError(
                "masked_decay='auto': only Sparse24Trainer determines it; set a number here, such as the one that "
                "Sparse24Trainer(...).tune_masked_decay() chooses"
            )
        super().check_run(total_steps, optimizer)

    def before_step(self, weights: Mapping[str, SparseWeight], context: StepContext) -> None:
        decay = self.settings.masked_decay
        if not decay or context.phase == "dense":
            return
        targets: list[Tensor] = []
        parameters: list[Tensor] = []
        masks: list[Tensor] = []
        alphas: list[float] = []
        for name, weight in first_of_each(weights).items():
            parameter, gradient = local(weight.master), local_gradient(weight.master)
            if gradient is None or not parameter.numel():  # there may be more processes than rows
                continue
            on_gradient = self.settings.decay_on == "gradient"
            targets.append(gradient if on_gradient else parameter)
            parameters.append(parameter)
            masks.append(context.mask(name, weight))
            alphas.append(decay if on_gradient else -decay * context.learning_rate(name))
        foreach_masked_decay_(targets, parameters, masks, alphas)
