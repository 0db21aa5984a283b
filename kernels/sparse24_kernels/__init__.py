"""Tensor functions for 2:4 sparse training: pruning, masks, gradient estimates, GEMMs.

Depends on torch and, on a GPU, Triton. Every function raises ValueError for arguments that it does not take, before
torch sees them. From the bottom up:

    formats.py    what masks and sparse matrices look like in memory, and their sizes
    checks.py     what the public functions check of their arguments
    reference/    the specification in plain PyTorch, on any device
    gpu/, cpu/    the same functions as Triton kernels, and many of them in C++
    dispatch.py   which of these runs an operator, with a reason
    gemm/         GEMMs with a 2:4 operand: backends, storage, autotuning, plans
    the rest      the public functions: what they compute, arguments checked, one torch operator each

Here are the names that most users need. The others stay where they are defined: names of choices beside their function
(`transposable.SOLVERS`, `scale.SCALE_RULES`, `gated.GATED_ACTIVATIONS`, `fp8.FP8_FORMATS`), `fp8.fp8_quantize` and
`fp8.fp8_simulate`, `masks.count_flips`, `decay.foreach_masked_decay_`, `dispatch.choose_kernels`,
and of `gemm`: `operand.Operand`, `problem.Algorithm`, `planning.choose_backend`.
"""

from .decay import masked_decay_
from .formats import Packed, Pattern
from .gated import gated_activation
from .gemm.backend import GemmBackend, GemmPlan, register_backend
from .gemm.planning import plan_gemm, plan_packed
from .gemm.problem import GemmProblem, linear_problem, mm_problem
from .masks import nm_mask, pack_bits, unpack_bits
from .matmul import compress, packed_linear, sparse_linear, sparse_mm
from .mvue import mvue
from .packing import gather_nm, pack_nm, quantize_packed, unpack_nm
from .prune import apply_mask, nm_prune, prune_forms, soft_threshold
from .scale import s_ste_scale
from .transposable import transposable_mask

__all__ = [
    "GemmBackend",
    "GemmPlan",
    "GemmProblem",
    "Packed",
    "Pattern",
    "apply_mask",
    "compress",
    "gated_activation",
    "gather_nm",
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
    "quantize_packed",
    "register_backend",
    "s_ste_scale",
    "soft_threshold",
    "sparse_linear",
    "sparse_mm",
    "transposable_mask",
    "unpack_bits",
    "unpack_nm",
]
