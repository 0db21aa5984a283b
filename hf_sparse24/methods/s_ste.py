"""S-STE: prune continuously, so that there are no masks to oscillate.

Method card
    Forward          Z = X (beta S(W))^T with the soft threshold S(w) = sign(w) max(|w| - t, 0), t the second smallest
                     magnitude of the four. S is continuous: a weight enters and leaves at zero.
    Scale            beta = <W, S(W)> / ||S(W)||^2, one fp32 number per weight tensor, computed when sparsity begins,
                     then frozen and saved (recomputed it grows without bound and flips explode, the paper's Fig. 4).
                     `scale_rule`, `scale_frozen`, `threshold_gamma` and `grad_input_weight` are there for the paper's
                     ablations (Tables 1 to 3, Fig. 4); its mean and maximum over the weights are logged
    Backward         dX = dZ (beta S(W)), a dense GEMM with the sparse values
                     dW = MVUE(dZ^T) X, passed straight through to W: no beta, no mask
    Hyper-parameters none; no dense phase
    Known limits     grad_input stays a dense GEMM; only output and (through MVUE) grad_weight can be sparse
    Deviations       MVUE is exact, the least variance with one random number per group; the authors' code draws twice,
                     which has more variance (`weight_grad="mvue-approx"`). Tokens that are no multiple of four are
                     padded with zeros. FP8 is off unless `fp8=True`, which simulates it as the authors' code does; the
                     paper's GPT-2 results have it. Fine-tuning draws MVUE too; the authors' fine-tuning scripts do not
                     (`weight_grad="dense"`, as our recipes set it). beta = 1 for a weight whose S(W) is all zeros (the
                     formula divides by zero). The mask shown in metrics keeps the lower index at ties, the public code
                     the higher.
    Measured here    recipes/results/methods.md, on a small Llama; docs/measured/pretrained.md, on SmolLM2-135M
    Reference        Hu et al. 2024 (arXiv 2409.09099), section 4.
"""

import math
from dataclasses import dataclass
from typing import Any

import sparse24_kernels as kernels
import torch
from sparse24_kernels.scale import SCALE_RULES
from torch import Tensor

from ..weights.rules import SoftThreshold, Values
from ..weights.sharding import whole
from ..weights.view import WeightView
from .base import SparseMethod
from .context import StepContext
from .registry import register_method
from .settings import GemmSettings, PhaseSettings, is_number, one_of, setting, with_default


def _is_scale_rule(value: Any) -> str | None:
    is_scale = is_number(value) and 0 < value < 3e38
    return None if is_scale or value in SCALE_RULES else f"must be one of {list(SCALE_RULES)} or a number above 0"


def _is_gamma(value: Any) -> str | None:
    return None if is_number(value) and 0 <= value < 1 else "must be a number in [0, 1)"


@register_method("s-ste")
class SSTE(SparseMethod):
    mask_is_local = True
    settings_of_state = ("scale_rule", "threshold_gamma")

    @dataclass(frozen=True, kw_only=True)
    class Settings(PhaseSettings, GemmSettings):
        weight_grad: str = with_default(GemmSettings, "weight_grad", "mvue", "section 5 of the paper")
        scale_rule: str | float = setting(
            "mse",
            _is_scale_rule,
            "what S-STE's scale keeps of the dense weight: 'mse' the least squared difference (Table 2 picks it), 'l1' "
            "its L1 norm; 'none' is no scale; a number above 0 is the scale of all weights (Fig. 4)",
        )
        scale_frozen: bool = setting(
            True,
            one_of(True, False),
            "True keeps the scale that sparsity began with; False recomputes it after every step, which the paper "
            "shows to be harmful (Fig. 4)",
        )
        threshold_gamma: float = setting(
            0.0,
            _is_gamma,
            "gamma in [0, 1) of the threshold gamma |t3| + (1 - gamma) |t2|, t2 and t3 the second and third smallest "
            "magnitude of the four; Table 1 picks 0",
        )

    def init_state(self, view: WeightView, step: int, total_steps: int) -> dict[str, Tensor]:
        rule, weight = self.settings.scale_rule, view.matrix
        if not isinstance(rule, str):
            return {"scale": weight.new_full((), rule, dtype=torch.float32)}
        if not self.settings.threshold_gamma or rule == "none":
            return {"scale": kernels.s_ste_scale(weight, *self.pattern, view.dim, rule)}
        pruned = self._soft_threshold(view)
        least_squares = (weight * pruned).sum() / pruned.square().sum()
        scale = least_squares if rule == "mse" else weight.abs().sum() / pruned.abs().sum()
        return {"scale": torch.where(pruned.any(), scale, 1.0).float()}

    def state_of_pruned(self, view: WeightView) -> dict[str, Tensor]:
        if self.settings.threshold_gamma:
            raise ValueError(
                f"threshold_gamma={self.settings.threshold_gamma} prunes a 2:4 weight once more, so nothing can be "
                f"merged into one; export the model first"
            )
        # Its threshold is 0: nothing is taken off that a scale would have to make up for.
        return {"scale": torch.ones_like(view.state["scale"])}

    def check_state(self, view: WeightView) -> str | None:
        # |w| = |s| + t wherever s = S(w) is not zero, so beta - 1 is an average of t / |s|, or more with the L1 norms.
        # In fp32 two numbers differ by 2^-24 of the larger at least: t / |s| < 2^24. Sums round, by far less than 2x.
        scale, rule = float(view.state["scale"]), self.settings.scale_rule
        if not isinstance(rule, str):
            is_given = math.isclose(scale, rule, rel_tol=1e-6)
            return None if is_given else f"scale is {scale:g}, and scale_rule is {rule:g}"
        largest, allowed = (3.4e38, "a finite number >= 1") if rule == "l1" else (2.0**25, "1 to 2^25")
        if 0.999 <= scale <= largest:
            return None
        return f"scale is {scale:g}, and scale_rule={rule!r} gives {allowed}"

    def prune(self, view: WeightView) -> SoftThreshold | Values:
        if self.settings.threshold_gamma:
            return Values(view.state["scale"] * self._soft_threshold(view))
        return SoftThreshold(view.state["scale"])

    def refreshes_state(self, step: int, total_steps: int) -> bool:
        return not self.settings.scale_frozen

    def metrics(self, context: StepContext) -> dict[str, float]:
        """`scale_mean` and `scale_max`, of the scales of all weights."""
        scales = torch.cat([whole(weight.state["scale"]).flatten().cpu() for weight in context.weights.values()])
        return {"scale_mean": scales.mean().item(), "scale_max": scales.max().item()}

    def _soft_threshold(self, view: WeightView) -> Tensor:
        """S(W) with a threshold between the largest magnitude that is dropped and the smallest that is kept."""
        (n, m), dim = self.pattern, view.dim + 1
        groups = view.matrix.to(torch.promote_types(view.matrix.dtype, torch.float32)).unflatten(view.dim, (-1, m))
        dropped, kept = groups.abs().sort(dim).values.split((m - n, n), dim)
        threshold = dropped.narrow(dim, -1, 1).lerp(kept.narrow(dim, 0, 1), self.settings.threshold_gamma)
        return (groups.sign() * (groups.abs() - threshold).clamp(min=0)).flatten(view.dim, dim)
