"""Fixed mask: choose the mask once, then train the weights it keeps.

Method card
    Forward          Z = X (M * W)^T with one mask M
    Backward         dX = dZ (M * W),  dW = M * (dZ^T X): what M drops has no part in clipping, and no moments
    Mask             N largest magnitudes of every M when the model is patched, or what `oneshot` chose
    Dropped weights  zero from the first optimizer step on, also in what is saved; before that, or frozen, they stay as
                     they were (`oneshot` has made them zero). An optimizer that averages weights by itself brings a
                     part of them back; the mask drops it in every forward pass and export
    Hyper-parameters none. `master="packed"`: the Parameter is the kept values alone, and weights, gradients and the
                     optimizer's state take half the memory (docs/guides/packed_master.md)
    Known limits     what the mask drops is lost: start from a well trained model, and prefer `oneshot`'s masks
    Deviations       ASP masks gradients when the optimizer steps, after clipping; here backward does. It zeroes weights
                     when it prunes; here the first optimizer step does. It can permute channels first; here nothing
                     does. Convolutions stay dense
    Measured here    recipes/results/methods.md, on a small Llama; docs/measured/pretrained.md, on SmolLM2-135M
    Reference        Mishra et al. 2021 (arXiv 2104.08378), section 4: train dense, prune once, repeat the training.
"""

from dataclasses import dataclass
from typing import ClassVar

import sparse24_kernels as kernels
from torch import Tensor

from ..weights.gemms import PRUNED
from ..weights.rules import Mask, wrong_groups
from ..weights.storage import WeightView
from .base import SparseMethod
from .registry import register_method
from .settings import MasterSettings, StandardSettings


class KeptMaskMethod(SparseMethod):
    """A method whose mask is state: the buffer `mask_bits`, packed along the last dimension. `init_state` chooses it,
    by magnitude unless a subclass returns another `{"mask_bits": kernels.pack_bits(mask)}`."""

    mask_is_local = True
    keeps_fewer: ClassVar[bool] = False  # whether a mask may keep fewer than N of every M

    @property
    def both_ways(self) -> str | None:
        """The solver of masks that are N:M along both dimensions, also for `oneshot`; None: along the inputs."""
        return "exact" if self.transposable and self.gemms.grad_input.weight == PRUNED else None

    def init_state(self, view: WeightView, step: int, total_steps: int) -> dict[str, Tensor]:
        if self.both_ways:
            return {"mask_bits": kernels.transposable_mask(view.matrix, *self.pattern, self.both_ways, packed=True)}
        return {"mask_bits": kernels.nm_mask(view.matrix, *self.pattern, view.dim, packed=True)}

    def adopt_mask(self, view: WeightView, mask: Tensor) -> dict[str, Tensor]:
        return {"mask_bits": kernels.pack_bits(mask)}

    def prune(self, view: WeightView) -> Mask:
        return Mask(view.state["mask_bits"])

    def check_state(self, view: WeightView) -> str | None:
        dims = (0, 1) if self.both_ways else (view.dim,)
        wrong = wrong_groups(self.mask(view), view, self.pattern, dims, exactly=not self.keeps_fewer)
        return wrong and f"mask_bits {wrong}"


@register_method("fixed-mask")
class FixedMask(KeptMaskMethod):
    keeps_zeros = True
    settings_of_state: ClassVar[tuple[str, ...]] = ("master",)

    @dataclass(frozen=True, kw_only=True)
    class Settings(MasterSettings, StandardSettings):
        pass
