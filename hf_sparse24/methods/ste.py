"""STE: prune by magnitude in every forward, and let the gradient through to all weights.

Method card
    Forward          Z = X S(W)^T, S keeps the N largest magnitudes of every M along the input dimension
    Backward         dX = dZ S(W),  dW = dZ^T X  (unmasked: the straight-through estimator)
    Hyper-parameters none
    Known limits     S is discontinuous, so a weight that hovers at the border flips in and out of the mask and the
                     loss jumps with it; SR-STE and S-STE are two answers to that.
    Measured here    recipes/results/methods.md, on two tiny models
    Reference        Bengio et al. 2013 (arXiv 1308.3432) for the estimator; the baseline of SR-STE's section 3.1.
"""

from collections.abc import Sequence

import sparse24_kernels as kernels
import torch
from torch import Tensor

from .base import SparseMethod


class STE(SparseMethod):
    def mask(self, weight: Tensor, dim: int, state: dict[str, Tensor], packed: bool) -> Tensor:
        return kernels.nm_mask(weight, self.n, self.m, dim, packed)

    def sparse_weight(
        self, weight: Tensor, dim: int, state: dict[str, Tensor], dtype: torch.dtype, forms: Sequence[str]
    ) -> tuple[Tensor, ...]:
        return kernels.prune_forms(weight, forms, "magnitude", self.n, self.m, dim, dtype=dtype)
