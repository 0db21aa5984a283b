"""AST: a straight-through mask, an optimizer that lets dropped weights fade, and the dense model as teacher.

Method card
    Forward          Z = X (M * W)^T, M the N largest magnitudes of every M
    Backward         dX = dZ (M * W),  dW = dZ^T X (unmasked: the straight-through estimator)
    Mask             refreshed every `mask_interval` = 10 optimizer steps, fixed in between
    Optimizer        `AdamS`: u = mu + lambda_t (1 - M) W, v the variance of u, W <- W - lr u^ / (sqrt(v^) + eps).
                     `Sparse24Trainer` makes it; in a loop of your own you make it
    Loss             1/3 cross entropy + 2/3 T^2 KL(teacher || student), T = 2, once a teacher is given: the dense model
                     before it was patched (`Sparse24Trainer(teacher=...)`, `distill`)
    Hyper-parameters masked_decay = lambda = 1e-4 (GPT-2), reached linearly over the first quarter (`decay_ramp`).
                     It counts beside the momentum of the gradient, so smaller models and batches need more:
                     `kept_magnitude` in the logs should rise, and `flip_rate` fade
    Deviations       For LLaMA2-7B the authors add up to 6e-5 W to the gradient instead, after 3,000 of 15,000 steps,
                     with 1/3 KL; here there is one way. No low-rank boost (SLoRB): merged, its weight is dense. Their
                     GPT-2 code takes `~mask` of an int32 mask, so it makes weights grow; their LLaMA code and this do
                     not. They train without weight decay on LLaMA; here it is AdamW's, as the optimizer is given it
    Known limits     without a teacher it is SR-STE with another placement of the decay. DeepSpeed ZeRO has no place for
                     an optimizer of a method's own
    Measured here    recipes/results/methods.md, on a small Llama; docs/measured/pretrained.md, on SmolLM2-135M
    Reference        Huang et al. 2024 (arXiv 2407.20584), sections 3.2 to 3.4, and the authors' code.
"""

from dataclasses import dataclass

from sparse24_kernels.decay import masked_decay_
from torch import Tensor

from .adam_s import AdamSMethod, MaskIntervalSettings
from .registry import register_method
from .schedule import to_steps
from .settings import LENGTH, GemmSettings, is_length, is_non_negative, setting


@register_method("ast")
class AST(AdamSMethod):
    teacher_loss = (2 / 3, 2.0)

    @dataclass(frozen=True, kw_only=True)
    class Settings(MaskIntervalSettings, GemmSettings):
        masked_decay: float = setting(
            1e-4, is_non_negative, "lambda >= 0: lambda * weight is added to the update of pruned weights; GPT-2's"
        )
        decay_ramp: int | float = setting(
            0.25, is_length, f"length of training over which masked_decay rises from 0, in a line: {LENGTH}"
        )

    def decay(self, update: Tensor, weight: Tensor, mask: Tensor, step: int, total_steps: int) -> None:
        ramp = to_steps(self.settings.decay_ramp, total_steps)
        share = min(1.0, step / ramp) if ramp else 1.0
        masked_decay_(update, weight, mask, self.settings.masked_decay * share)
