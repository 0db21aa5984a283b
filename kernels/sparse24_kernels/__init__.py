"""Tensor functions for 2:4 sparse training: pruning, masks, gradient estimates, products.

Depends on torch alone. `reference.py` says what each function computes, `ops.py` is the public face of it,
`backends.py` decides which implementation runs.
"""

from .backends import BACKENDS, Choice, choose_backend
from .ops import (
    SCALE_RULES,
    SOLVERS,
    apply_mask,
    fp8_simulate,
    gated_activation,
    masked_decay_,
    mvue,
    nm_mask,
    pack_bits,
    s_ste_scale,
    soft_threshold,
    sparse_mm,
    transposable_mask,
    unpack_bits,
)

__all__ = [
    "BACKENDS",
    "SCALE_RULES",
    "SOLVERS",
    "Choice",
    "apply_mask",
    "choose_backend",
    "fp8_simulate",
    "gated_activation",
    "masked_decay_",
    "mvue",
    "nm_mask",
    "pack_bits",
    "s_ste_scale",
    "soft_threshold",
    "sparse_mm",
    "transposable_mask",
    "unpack_bits",
]
