"""Tensor functions for 2:4 sparse training: pruning, masks, gradient estimates, GEMMs.

Depends on torch and, on a GPU, Triton. Every function raises ValueError for arguments that it does not take, before
torch sees them. From the bottom up:

    formats.py    what masks and sparse matrices look like in memory, and their sizes
    checks.py     what the public functions check of their arguments
    reference/    the specification in plain PyTorch, on any device
    gpu/, cpu/    the same functions as Triton kernels, and many of them in C++
    first_use.py  kernels are checked on first use, with the problems of hard_problems.py
    dispatch.py   which of these runs an operator, with a reason
    gemm/         GEMMs with a 2:4 operand: backends, storage, autotuning, plans
    the rest      the public functions: what they compute, arguments checked, one torch operator each

Here are the operators and formats. Authors of GEMM backends import from `gemm`. Other names stay in their modules:
choices of an argument (`transposable.SOLVERS`, `prune.SCALE_RULES`, `gated.GATED_ACTIVATIONS`, `fp8.FP8_FORMATS`),
`prune.prune_forms`, `packing.gather_nm`, `masks.count_flips`, `decay.foreach_masked_decay_`, `fp8.fp8_simulate` and
`dispatch.choose_kernels`.
"""

from .decay import masked_decay_
from .formats import Packed, Pattern
from .gated import gated_activation
from .masks import nm_mask, pack_bits, unpack_bits
from .matmul import packed_linear, sparse_linear, sparse_mm
from .mvue import mvue
from .packing import pack_nm, quantize_packed, unpack_nm
from .prune import apply_mask, nm_prune, s_ste_scale, soft_threshold
from .transposable import transposable_mask

__all__ = [
    "Packed",
    "Pattern",
    "apply_mask",
    "gated_activation",
    "masked_decay_",
    "mvue",
    "nm_mask",
    "nm_prune",
    "pack_bits",
    "pack_nm",
    "packed_linear",
    "quantize_packed",
    "s_ste_scale",
    "soft_threshold",
    "sparse_linear",
    "sparse_mm",
    "transposable_mask",
    "unpack_bits",
    "unpack_nm",
]
