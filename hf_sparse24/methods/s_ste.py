"""S-STE: prune continuously, so that there are no masks to oscillate.

Method card
    Forward          Z = X (beta S(W))^T with the soft threshold S(w) = sign(w) max(|w| - t, 0), t the second smallest
                     magnitude of the four. S is continuous: a weight enters and leaves at zero.
    Scale            beta = <W, S(W)> / ||S(W)||^2, one fp32 number per weight tensor, computed when sparsity begins,
                     then frozen and saved. The paper reports that it grows, and flips explode, where it is computed in
                     every step (Fig. 4); our small model shows only the first (docs/measured/claims.md, S5). Logs have
                     its mean and maximum over the weights. `recipes/ablations.py` has the paper's ablations (Tables
                     1 and 3, Fig. 4); `scale_rule` is that of Table 2
    Backward         dX = dZ (beta S(W)), a dense GEMM with the sparse values
                     dW = MVUE(dZ^T) X, passed straight through to W: no beta, no mask
    Hyper-parameters none; no dense phase
    Known limits     grad_input stays a dense GEMM; only output and (through MVUE) grad_weight can be sparse
    Deviations       MVUE as in `t-sr-ste`. FP8 is off unless `fp8=True`, which simulates it as the authors' code does;
                     the paper's GPT-2 results have it. Fine-tuning draws MVUE too; the authors' fine-tuning scripts do
                     not (`weight_grad="dense"`, as our recipes set it). beta = 1 for a weight whose S(W) is all zeros
                     (the formula divides by zero). The mask shown in metrics keeps the lower index at ties, the public
                     code the higher.
    Measured here    recipes/results/methods.md, on a small Llama; docs/measured/pretrained.md, on SmolLM2-135M
    Reference        Hu et al. 2024 (arXiv 2409.09099), section 4.
"""

from dataclasses import dataclass

import sparse24_kernels as kernels
import torch
from sparse24_kernels.prune import SCALE_RULES
from torch import Tensor

from ..weights.rules import SoftThreshold
from ..weights.sharding import whole
from ..weights.storage import WeightView
from .base import SparseMethod, StepContext
from .registry import register_method
from .settings import GemmSettings, PhaseSettings, one_of, setting, with_default


@register_method("s-ste")
class SSTE(SparseMethod):
    mask_is_local = True
    settings_of_state = ("scale_rule",)

    @dataclass(frozen=True, kw_only=True)
    class Settings(PhaseSettings, GemmSettings):
        weight_grad: str = with_default(GemmSettings, "weight_grad", "mvue", "section 5 of the paper")
        scale_rule: str = setting(
            "mse",
            one_of(*SCALE_RULES),
            "what S-STE's scale keeps of the dense weight: 'mse' the least squared difference (Table 2 picks it), 'l1' "
            "its L1 norm; 'none' is no scale",
        )

    def init_state(self, view: WeightView, step: int, total_steps: int) -> dict[str, Tensor]:
        return {"scale": kernels.s_ste_scale(view.matrix, *self.pattern, view.dim, self.settings.scale_rule)}

    def state_of_pruned(self, view: WeightView) -> dict[str, Tensor]:
        # Its threshold is 0: nothing is taken off that a scale would have to make up for.
        return {"scale": torch.ones_like(view.state["scale"])}

    def check_state(self, view: WeightView) -> str | None:
        # |w| = |s| + t wherever s = S(w) is not zero, so beta - 1 is an average of t / |s|, or more with the L1 norms.
        # In fp32 two numbers differ by 2^-24 of the larger at least: t / |s| < 2^24. Sums round, by far less than 2x.
        scale, rule = float(view.state["scale"]), self.settings.scale_rule
        largest, allowed = (3.4e38, "a finite number >= 1") if rule == "l1" else (2.0**25, "1 to 2^25")
        if 0.999 <= scale <= largest:
            return None
        return f"scale is {scale:g}, and scale_rule={rule!r} gives {allowed}"

    def prune(self, view: WeightView) -> SoftThreshold:
        return SoftThreshold(view.state["scale"])

    def metrics(self, context: StepContext) -> dict[str, float]:
        """`scale_mean` and `scale_max`, of the scales of all weights."""
        scales = torch.cat([whole(weight.state["scale"]).flatten().cpu() for weight in context.weights.values()])
        return {"scale_mean": scales.mean().item(), "scale_max": scales.max().item()}
