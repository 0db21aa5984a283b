"""Tensor functions for 2:4 sparse training: pruning, masks, gradient estimates, products.

Depends on torch and, on a GPU, Triton. Three rooms with the same files in each:

    this folder    the public functions: what they compute, arguments checked, one torch operator each
    reference/     the specification in plain PyTorch, on any device
    gpu/           the same functions as Triton kernels

`backends.py` decides which of the two runs, with a reason.
"""

from .backends import BACKENDS, Choice, choose_backend, choose_kernels, choose_product
from .decay import foreach_masked_decay_, masked_decay_
from .fp8 import FP8_FORMATS, fp8_quantize, fp8_simulate
from .gated import GATED_ACTIVATIONS, gated_activation
from .masks import count_flips, nm_mask, pack_bits, unpack_bits
from .matmul import (
    compress,
    linear_problem,
    mm_problem,
    plan_linear,
    plan_mm,
    sparse_linear,
    sparse_mm,
    why_not_sparse,
)
from .mvue import mvue
from .prune import (
    SCALE_RULES,
    Packed,
    apply_mask,
    nm_prune,
    pack_nm,
    prune_forms,
    s_ste_scale,
    soft_threshold,
    unpack_nm,
)
from .transposable import SOLVERS, transposable_mask

__all__ = [
    "BACKENDS",
    "FP8_FORMATS",
    "GATED_ACTIVATIONS",
    "SCALE_RULES",
    "SOLVERS",
    "Choice",
    "Packed",
    "apply_mask",
    "choose_backend",
    "choose_kernels",
    "choose_product",
    "compress",
    "count_flips",
    "foreach_masked_decay_",
    "fp8_quantize",
    "fp8_simulate",
    "gated_activation",
    "linear_problem",
    "masked_decay_",
    "mm_problem",
    "mvue",
    "nm_mask",
    "nm_prune",
    "pack_bits",
    "pack_nm",
    "plan_linear",
    "plan_mm",
    "prune_forms",
    "s_ste_scale",
    "soft_threshold",
    "sparse_linear",
    "sparse_mm",
    "transposable_mask",
    "unpack_bits",
    "unpack_nm",
    "why_not_sparse",
]
