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

import sparse24_kernels as kernels
from torch import Tensor

from .base import SparseMethod


class FixedMask(SparseMethod):
    def init_state(self, weight: Tensor, dim: int) -> dict[str, Tensor]:
        return {"mask_bits": kernels.pack_bits(kernels.nm_mask(weight, self.n, self.m, dim))}

    def mask(self, weight: Tensor, dim: int, state: dict[str, Tensor]) -> Tensor:
        return kernels.unpack_bits(state["mask_bits"], weight.shape[-1])
