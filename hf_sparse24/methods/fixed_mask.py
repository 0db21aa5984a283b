"""Fixed mask: choose the mask once, then train the weights it keeps.

Method card
    Forward          Z = X (M * W)^T with one mask M
    Backward         dX = dZ (M * W),  dW = dZ^T X (pruned weights move too, but are never seen again)
    Mask             N largest magnitudes of every M when the model is patched, or what `oneshot` chose
    Hyper-parameters none
    Known limits     what the mask drops is lost: start from a well trained model, and prefer `oneshot`'s masks
    Deviations       ASP also masks gradients and optimizer; here pruned weights just never reach a product
    Measured here    recipes/results/methods.md, on two tiny models
    Reference        Mishra et al. 2021 (arXiv 2104.08378), section 4: train dense, prune once, repeat the training.
"""

from collections.abc import Sequence

import sparse24_kernels as kernels
import torch
from torch import Tensor

from .base import SparseMethod


class FixedMask(SparseMethod):
    def init_state(self, weight: Tensor, dim: int) -> dict[str, Tensor]:
        return {"mask_bits": kernels.nm_mask(weight, self.n, self.m, dim, packed=True)}

    def mask(self, weight: Tensor, dim: int, state: dict[str, Tensor], packed: bool) -> Tensor:
        bits = state["mask_bits"]
        return bits if packed else kernels.unpack_bits(bits, weight.shape[-1])

    def sparse_weight(
        self, weight: Tensor, dim: int, state: dict[str, Tensor], dtype: torch.dtype, forms: Sequence[str]
    ) -> tuple[Tensor, ...]:
        return kernels.prune_forms(weight, forms, "mask", self.n, self.m, mask=state["mask_bits"], dtype=dtype)
