"""Tensor functions for 2:4 sparse training: pruning, masks, gradient estimates, GEMMs.

Depends on torch and, on a GPU, Triton. Every function raises ValueError for arguments that it does not take, before
torch sees them. From the bottom up:

    formats.py    what masks and sparse matrices look like in memory, and their sizes
    checks.py     what the public functions check of their arguments
    reference/    the specification in plain PyTorch, on any device
    gpu/          the same functions as Triton kernels
    dispatch.py   which of the two runs, with a reason
    gemm/         GEMMs with a 2:4 operand: backends, storage, autotuning, plans
    the rest      the public functions: what they compute, arguments checked, one torch operator each
"""

from .decay import foreach_masked_decay_, masked_decay_
from .dispatch import Choice, choose_kernels
from .formats import Compression, Packed, Pattern
from .fp8 import FP8_FORMATS, fp8_quantize, fp8_simulate
from .gated import GATED_ACTIVATIONS, gated_activation
from .gemm.planning import BACKENDS, GemmPlan, choose_backend, gemm_unsupported, plan_gemm, plan_packed
from .gemm.problem import Algorithm, GemmProblem, linear_problem, mm_problem
from .masks import count_flips, nm_mask, pack_bits, unpack_bits
from .matmul import compress, packed_linear, sparse_linear, sparse_mm
from .mvue import mvue
from .prune import SCALE_RULES, apply_mask, nm_prune, pack_nm, prune_forms, s_ste_scale, soft_threshold, unpack_nm
from .transposable import SOLVERS, transposable_mask

__all__ = [
    "BACKENDS",
    "FP8_FORMATS",
    "GATED_ACTIVATIONS",
    "SCALE_RULES",
    "SOLVERS",
    "Algorithm",
    "Choice",
    "Compression",
    "GemmPlan",
    "GemmProblem",
    "Packed",
    "Pattern",
    "apply_mask",
    "choose_backend",
    "choose_kernels",
    "compress",
    "count_flips",
    "foreach_masked_decay_",
    "fp8_quantize",
    "fp8_simulate",
    "gated_activation",
    "gemm_unsupported",
    "linear_problem",
    "masked_decay_",
    "mm_problem",
    "mvue",
    "nm_mask",
    "nm_prune",
    "pack_bits",
    "pack_nm",
    "packed_linear",
    "plan_gemm",
    "plan_packed",
    "prune_forms",
    "s_ste_scale",
    "soft_threshold",
    "sparse_linear",
    "sparse_mm",
    "transposable_mask",
    "unpack_bits",
    "unpack_nm",
]
