"""Masked decay, the pull of pruned weights towards zero, for the methods that use it.

    g <- g + lambda_W (1 - mask) W        once per optimizer step, on the clipped, unscaled gradient

Hu et al. 2024 (arXiv 2404.01847), section 4.2, eq. (10); the regulariser is SR-STE's (arXiv 2102.04010), eq. (7).
"""

from dataclasses import dataclass

import torch
from sparse24_kernels.decay import masked_decay_

from .base import DENSE_PHASE, Piece, SparseMethod, StepContext
from .settings import MethodSettings, is_non_negative, one_of, setting

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class MaskedDecaySettings(MethodSettings):
    """How strongly pruned weights are pulled towards zero, and by what."""

    masked_decay: float | str = setting(
        2e-4,
        lambda value: None if isinstance(value, str) and value == AUTO else is_non_negative(value),
        "lambda_W >= 0, the pull of pruned weights towards zero, once per optimizer step; 'auto' lets Sparse24Trainer "
        "find it before training, by probes of the warm-up",
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
            way = "set a number here, such as that of Sparse24Trainer(...).tune_masked_decay()"
            raise ValueError(f"masked_decay='auto': only Sparse24Trainer determines it; {way}")
        groups, name = optimizer.param_groups if self.settings.masked_decay else [], type(optimizer).__name__
        if any(group.get("maximize") for group in groups):
            raise ValueError(f"{name}(maximize=True) would make pruned weights grow: minimize the negative instead")
        no_rate = any(group.get("lr") is None or group.get("relative_step") for group in groups)
        if no_rate and self.settings.decay_on == "weight":
            way = "give it one, or set decay_on='gradient'"
            raise ValueError(f"decay_on='weight' needs a learning rate, which {name} lacks: {way}")
        super().check_run(total_steps, optimizer)

    def change_gradients(self, pieces: list[Piece], context: StepContext) -> None:
        decay = self.settings.masked_decay
        if not decay or context.phase == DENSE_PHASE:
            return
        for piece in pieces:
            if self.settings.decay_on == "gradient":
                masked_decay_(piece.gradient, piece.values, piece.mask, decay)
            else:
                masked_decay_(piece.values, piece.values, piece.mask, -decay * piece.learning_rate)
