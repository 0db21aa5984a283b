"""CAST: train dense, and let what the mask drops fade to zero by the end of the run.

Method card
    Forward          Z = X (A * W)^T, dense to the last step: no GEMM is sparse in training
    Scales           A, one trained factor for each row and each of `scale_blocks` = 2 blocks of columns, 1 at first.
                     A group of M has one factor. Exports multiply it into the weight
    Mask             N largest magnitudes of every M, refreshed every `mask_interval` = 10 steps. Until the run ends,
                     only the optimizer uses it; then the model computes with M * A * W
    Optimizer        `AdamS`: where the mask keeps, u = mu; where it drops, u = (1 - a) mu + a lambda sign(W), with
                     a = t / T the share of the run that is done. v is the variance of u, and W <- W - lr u^ / (sqrt(v^)
                     + eps). `Sparse24Trainer` makes it; in a loop of your own you make it
    Loss             2/3 cross entropy + 1/3 KL(teacher || student), T = 1, once a teacher is given: the dense model
                     before it was patched
    Hyper-parameters masked_decay = lambda = 4e-7 (the paper's LLaMA2-7B, learning rate 2e-5)
    Known limits     The last step cuts off what is left of dropped weights. Watch `kept_magnitude` in the logs: it must
                     rise to 1. The decay wins over the gradient once a lambda > (1 - a) |mu|, so with a lambda far
                     below the gradient's size nothing fades (4e-7 is, on small models): raise it. A dropped weight
                     can move by the sum of lr_t a_t at the most, and ends at about the last learning rate: let that
                     fall to 0. The method warns before a run where weights are larger than that sum, and at its end
                     where much was cut off. Evaluations before the end are those of the dense model, so leave
                     `load_best_model_at_end` off. Stacked experts stay dense. DeepSpeed ZeRO has no place for an
                     optimizer of a method's own
    Deviations       The paper states neither betas nor the learning rate's schedule: torch's, and yours. Blocks of
                     columns are contiguous, our reading. Weight decay is AdamW's, as the optimizer is given it. There
                     is no public code, and a re-run by others (LLaMA2-7B, perplexity 6.14) is far from the paper's 5.58
    Measured here    recipes/results/methods.md, on a small Llama; docs/measured/pretrained.md, on SmolLM2-135M
    Reference        Huang et al. 2025 (arXiv 2509.25996).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from sparse24_kernels import apply_mask
from sparse24_kernels.decay import masked_decay_
from torch import Tensor

from ..progress import get_logger
from ..weights.sharding import local
from ..weights.view import WeightView
from .adam_s import AdamSMethod, MaskIntervalSettings
from .context import Pieces, StepContext
from .registry import register_method
from .schedule import Schedule
from .settings import is_non_negative, one_of, setting

logger = get_logger(__name__)

_SAMPLE = 10_000
"""Dropped weights of each layer that a warning looks at."""
LARGE = 0.02
"""Share of the L1 norm that the end of a run should not cut off."""


@register_method("cast")
class CAST(AdamSMethod):
    refreshes_in_dense = True
    teacher_loss = (1 / 3, 1.0)
    settings_of_state = ("scale_blocks",)

    @dataclass(frozen=True, kw_only=True)
    class Settings(MaskIntervalSettings):
        masked_decay: float = setting(
            4e-7, is_non_negative, "lambda >= 0 in the update of pruned weights, (1 - a) mu + a lambda sign(weight)"
        )
        scale_blocks: int = setting(
            2, one_of(0, 1, 2, 4, 8), "blocks of columns that have a trained scale of their own in each row; 0: none"
        )

    def unsupported(self, out: int, inputs: int) -> str | None:
        blocks = max(self.settings.scale_blocks, 1)
        unit = blocks * self.pattern.m
        if inputs % unit:
            return f"input size {inputs} is not a multiple of {unit}, as scale_blocks={blocks} needs"
        return super().unsupported(out, inputs)

    def init_parameters(self, view: WeightView) -> dict[str, Tensor]:
        blocks = self.settings.scale_blocks
        return {"scales": view.matrix.new_ones(view.matrix.shape[1 - view.dim], blocks)} if blocks else {}

    def reparametrize(self, weight: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        scales = parameters.get("scales")
        return weight if scales is None else weight * _by_column(scales, weight.shape[1])

    def schedule(self, total_steps: int) -> Schedule:
        """Dense to the last step, and sparse after it."""
        Schedule.from_lengths(total_steps, 0, 0)  # which checks total_steps
        return Schedule(total_steps, total_steps, None)

    def decay(self, update: Tensor, weight: Tensor, mask: Tensor, step: int, total_steps: int) -> None:
        share = step / total_steps
        masked_decay_(update, update, mask, -share)
        masked_decay_(update, weight.sign(), mask, share * self.settings.masked_decay)

    def change_gradients(self, pieces: Pieces, context: StepContext) -> None:
        super().change_gradients(pieces, context)
        if context.step == context.total_steps - 1 and (cut := _cut_off(pieces)) > LARGE:
            logger.warning(
                f"method {self.name!r}: the last step cuts off {cut:.0%} of the weights' L1 norm, which had not faded; "
                f"raise masked_decay={self.settings.masked_decay:g} until kept_magnitude rises to 1 in the logs"
            )

    def warning(self, rates: Sequence[float], context: StepContext) -> str | None:
        reach = sum(rate * step / len(rates) for step, rate in enumerate(rates))
        dropped = torch.cat([_dropped(weight.master, weight.local_mask()) for weight in context.weights.values()])
        beyond = float((dropped > reach).float().mean()) if len(dropped) else 0.0
        found = []
        if beyond > 0.01:
            found.append(
                f"{beyond:.0%} of the weights that the masks drop are larger than {reach:.2g}, which is about how far "
                f"this run can move them (the sum of lr_t t / T): the last step will cut off the rest. Train longer, "
                f"or with a higher learning rate"
            )
        if rates[-1] > max(rates) * max(0.1, 2 / len(rates)):  # a short run falls to 0 in long steps
            found.append(
                f"the learning rate ends at {rates[-1]:.2g}, and dropped weights keep about that size: take a "
                f"lr_scheduler_type that falls to 0, such as 'cosine' or 'linear'"
            )
        return "; ".join(found) or None


def _by_column(scales: Tensor, columns: int) -> Tensor:
    """Scales `[out, blocks]` as `[out, columns]`."""
    return scales.repeat_interleave(columns // scales.shape[1], 1)


def _cut_off(pieces: Pieces) -> float:
    """The share of the pieces' L1 norm that their masks drop."""
    sums = [(apply_mask(piece.values, piece.mask).abs().sum(), piece.values.abs().sum()) for piece in pieces]
    kept, whole = (float(sum(part)) for part in zip(*sums)) if sums else (1.0, 1.0)
    return 1 - kept / max(whole, 1e-38)


def _dropped(master: Tensor, mask: Tensor) -> Tensor:
    """Some of the magnitudes that a mask drops, of what this process holds, in fp32 on the CPU."""
    found = local(master)[~mask].abs()
    return found[:: max(1, len(found) // _SAMPLE)].float().cpu()
