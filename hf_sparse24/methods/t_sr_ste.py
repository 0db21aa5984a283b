"""T-SR-STE: masks that are N:M in both directions, so that all three GEMMs can be sparse.

Method card
    Forward          Z = X (M * W)^T, M the transposable mask of largest kept L1 norm (exact, 90 patterns a 4x4 tile)
    Backward         dX = dZ (M * W): 2:4 along its own contraction because M is transposable
                     dW = MVUE(dZ^T) X: the gradient pruned 2:4 along tokens, at random and unbiased
    Mask             refreshed every `mask_interval` = 40 optimizer steps, fixed in between; `mask_solver` says how,
                     `pattern` may be any N:M (Hubara et al. 2021 train 4:8); those within 2:4 have hardware
    Regularisation   g <- g + lambda_W (1 - M) W, after clipping and unscaling, once per optimizer step
    Schedule         the last sixth of training (`dense_tail`) is dense; the trained model *is* dense
    Hyper-parameters masked_decay: 6e-5 GPT-2 124M, 2e-4 GPT-2 350M, 6e-6 BERT (the public sources contradict each
                     other for 774M and 1558M: 6e-5 or 2e-4)
    Known limits     the sizes of a layer must be multiples of M both ways; the mask keeps less than a row-wise one
                     (0.703 of the L1 norm of Gaussian weights, against 0.745)
    Deviations       MVUE is exact, the least variance with one random number per group; the authors' code draws twice,
                     which has more variance (`weight_grad="mvue-approx"`). Tokens that are no multiple of four are
                     padded with zeros. The default decay is GPT-2 124M's for every model; the paper finds one for each
                     during warm-up (`masked_decay="auto"`). The first mask is solved for when the model is patched.
                     Scores are fp32 sums (theirs may be TF32), so near-ties can differ.
    Measured here    recipes/results/methods.md, on a small Llama
    Reference        Hu et al. 2024 (arXiv 2404.01847), sections 4 and 5.
"""

from dataclasses import dataclass

from sparse24_kernels.transposable import SOLVERS

from .fixed_mask import KeptMaskMethod
from .masked_decay import MaskedDecayMethod, MaskedDecaySettings
from .registry import register_method
from .settings import LENGTH, GemmSettings, PhaseSettings, is_positive_length, one_of, setting, to_steps, with_default


@register_method("t-sr-ste")
class TSRSTE(MaskedDecayMethod, KeptMaskMethod):
    transposable = True
    flips_at_refresh = True
    keeps_fewer = True  # as two solvers do; masks of one may be left when the solver is changed

    @dataclass(frozen=True, kw_only=True)
    class Settings(MaskedDecaySettings, PhaseSettings, GemmSettings):
        masked_decay: float | str = with_default(MaskedDecaySettings, "masked_decay", 6e-5, "the paper's GPT-2 124M")
        mask_interval: int | float = setting(
            40, is_positive_length, f"length between mask refreshes, in which masks stay (section 5): {LENGTH}"
        )
        mask_solver: str = setting(
            "exact",
            one_of(*SOLVERS),
            "how the transposable mask is found: 'exact' keeps the largest possible L1 norm (2:4 over all 90 patterns "
            "of a 4 x 4 tile, other N:M by 'min-cost-flow', which needs OR-tools); 'greedy' and 'two-approx' are fast "
            "for any N:M, and keep less",
        )
        weight_grad: str = with_default(GemmSettings, "weight_grad", "mvue", "section 5 of the paper")
        dense_tail: int | float = with_default(
            PhaseSettings, "dense_tail", 1 / 6, "section 4.4 of the paper, 50k of 300k steps"
        )

    @property
    def both_ways(self) -> str:
        return self.settings.mask_solver

    def refreshes_state(self, step: int, total_steps: int) -> bool:
        interval = max(1, to_steps(self.settings.mask_interval, total_steps))
        return (step - self.schedule(total_steps).start) % interval == 0
