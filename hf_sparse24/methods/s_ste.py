"""S-STE: prune continuously, so that there are no masks to oscillate.

Method card
    Forward          Z = X (beta S(W))^T with the soft threshold S(w) = sign(w) max(|w| - t, 0), t the second smallest
                     magnitude of the four. S is continuous: a weight enters and leaves at zero.
    Scale            beta = <W, S(W)> / ||S(W)||^2, one fp32 number per weight tensor, computed when sparsity begins,
                     then frozen and saved (recomputed it grows without bound and flips explode, the paper's Fig. 4).
                     `scale_rule` and `scale_frozen` are there for the paper's ablation (Table 2)
    Backward         dX = dZ (beta S(W)), a dense product with the sparse values
                     dW = MVUE(dZ^T) X, passed straight through to W: no beta, no mask
    Hyper-parameters none; no dense phase
    Known limits     grad_input stays a dense product; only the forward and (through MVUE) grad_weight can be sparse
    Deviations       beta = 1 for a weight whose S(W) is all zeros (the formula divides by zero). The mask shown in
                     metrics keeps the lower index at ties, the public code the higher.
    Measured here    recipes/results/methods.md, on two tiny models
    Reference        Hu et al. 2024 (arXiv 2409.09099), section 4.
"""

from collections.abc import Sequence

import sparse24_kernels as kernels
import torch
from torch import Tensor

from .base import SparseMethod


class SSTE(SparseMethod):
    def init_state(self, weight: Tensor, dim: int) -> dict[str, Tensor]:
        return {"scale": kernels.s_ste_scale(weight, self.n, self.m, dim, self.config.scale_rule)}

    def mask(self, weight: Tensor, dim: int, state: dict[str, Tensor], packed: bool) -> Tensor:
        return kernels.nm_mask(weight, self.n, self.m, dim, packed)

    def sparse_weight(
        self, weight: Tensor, dim: int, state: dict[str, Tensor], dtype: torch.dtype, forms: Sequence[str]
    ) -> tuple[Tensor, ...]:
        return kernels.prune_forms(
            weight, forms, "soft-threshold", self.n, self.m, dim, scale=state["scale"], dtype=dtype
        )
