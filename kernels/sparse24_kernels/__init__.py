"""Tensor functions for 2:4 sparse training: pruning, masks, gradient estimates, GEMMs.

Depends on torch and, on a GPU, Triton. Every function raises ValueError for arguments that it does not take, before
torch sees them. `kernels/README.md` says what each module is for.

Here are the operators and formats. Authors of GEMM backends import from `gemm`. Other names stay in their modules;
the reference pages list them.
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
