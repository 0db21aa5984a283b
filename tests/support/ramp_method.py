"""Gradual pruning as a user would write it, in a module outside the package.

Method card
    Forward          Z = X (M * W)^T; M keeps all weights of some groups of M, and the N largest of the others
    Schedule         the share of groups that are N:M is 1 - (1 - t)^3, t from 0 to 1 over the first half of training;
                     the phase is `"ramp"` until then, in which all GEMMs are dense math
    Hyper-parameters `ramp_interval`, the steps between two masks
    Known limits     made for tests
    Measured here    nowhere
    Reference        Zhu and Gupta 2017 (arXiv 1710.01878), eq. (1)
"""

from dataclasses import dataclass

import torch
from sparse24_kernels import nm_mask, pack_bits
from torch import Tensor

from hf_sparse24 import register_method
from hf_sparse24.methods import (
    GemmSettings,
    KeptMaskMethod,
    PhaseSettings,
    StepContext,
    WeightView,
    is_positive_length,
    setting,
    to_steps,
)

RAMP = "ramp"


@register_method("cubic-ramp")
class CubicRamp(KeptMaskMethod):
    phases = ("sparse", RAMP, "dense")
    unstructured_phases = (RAMP,)
    flips_at_refresh = True

    @dataclass(frozen=True, kw_only=True)
    class Settings(PhaseSettings, GemmSettings):
        ramp_interval: int | float = setting(1, is_positive_length, "length between two masks of the ramp")

    def init_state(self, view: WeightView, step: int, total_steps: int) -> dict[str, Tensor]:
        share = 1 - (1 - min(1.0, 2 * step / total_steps)) ** 3
        size = view.matrix.shape[view.dim]
        group = torch.arange(size, device=view.matrix.device).div(self.pattern.m, rounding_mode="floor")
        pruned = (group + 0.5) / (size / self.pattern.m) < share
        kept = nm_mask(view.matrix, *self.pattern, view.dim) | ~(pruned if view.dim == 1 else pruned[:, None])
        return {"mask_bits": pack_bits(kept)}

    def check_state(self, view: WeightView) -> str | None:
        return None  # masks of the ramp keep more

    def phase(self, step: int, total_steps: int, optimizer: torch.optim.Optimizer) -> str:
        phase = super().phase(step, total_steps, optimizer)
        return RAMP if phase == "sparse" and 2 * step < total_steps else phase

    def refreshes_state(self, step: int, total_steps: int) -> bool:
        return 2 * step <= total_steps and step % to_steps(self.settings.ramp_interval, total_steps) == 0

    def metrics(self, context: StepContext) -> dict[str, float]:
        return {"ramp": min(1.0, 2 * context.step / context.total_steps)}
