"""T-SR-STE: masks that are N:M in both directions, so that all three products can be sparse.

Method card
    Forward          Z = X (M * W)^T, M the transposable mask of largest kept L1 norm (exact, 90 patterns a 4x4 tile)
    Backward         dX = dZ (M * W): 2:4 along its own contraction because M is transposable
                     dW = MVUE(dZ^T) X: the gradient pruned 2:4 along tokens, at random and unbiased
    Mask             searched every `mask_interval` = 40 optimizer steps, fixed in between; `mask_solver` says how,
                     `pattern` may be any N:M (Hubara et al. 2021 train 4:8), of which only 2:4 has hardware
    Regularisation   g <- g + lambda_W (1 - M) W, after clipping and unscaling, once per optimizer step
    Schedule         the last sixth of training (`dense_tail`) is dense; the trained model *is* dense
    Hyper-parameters masked_decay: 6e-5 GPT-2 124M, 2e-4 GPT-2 350M, 6e-6 BERT (the public sources contradict each
                     other for 774M and 1558M: 6e-5 or 2e-4)
    Known limits     the sizes of a layer must be multiples of M both ways; the mask keeps less than a row-wise one
                     (0.703 of the L1 norm of Gaussian weights, against 0.745)
    Deviations       The mask lives in a buffer of the layer as packed bits (theirs: an attribute on the Parameter), so
                     checkpoints, DDP and deepcopy carry it. The first mask is searched when the model is patched.
                     Scores are fp32 sums (theirs may be TF32), so near-ties can differ.
    Measured here    recipes/results/methods.md, on two tiny models
    Reference        Hu et al. 2024 (arXiv 2404.01847), sections 4 and 5.
"""

from collections.abc import Sequence

import sparse24_kernels as kernels
import torch
from torch import Tensor

from .base import SparseMethod


class TSRSTE(SparseMethod):
    transposable = True
    needs_square_groups = True

    def init_state(self, weight: Tensor, dim: int) -> dict[str, Tensor]:
        return {"mask_bits": kernels.transposable_mask(weight, self.n, self.m, self.config.mask_solver, packed=True)}

    def mask(self, weight: Tensor, dim: int, state: dict[str, Tensor], packed: bool) -> Tensor:
        bits = state["mask_bits"]
        return bits if packed else kernels.unpack_bits(bits, weight.shape[-1])

    def sparse_weight(
        self, weight: Tensor, dim: int, state: dict[str, Tensor], dtype: torch.dtype, forms: Sequence[str]
    ) -> tuple[Tensor, ...]:
        return kernels.prune_forms(weight, forms, "mask", self.n, self.m, mask=state["mask_bits"], dtype=dtype)
