"""Kernels for CPUs in C++: GEMMs with packed weights, and pruning.

Importing this package compiles and loads nothing.
"""

from ..operators import Operators
from . import packed, prune

OPERATORS = Operators(
    nm_mask=prune.nm_mask,
    transposable_mask=prune.transposable_mask,
    prune=prune.prune,
    mvue=prune.mvue,
    masked_decay_=prune.masked_decay_,
    unpack_nm=packed.unpack_nm,
    packed_mm=packed.packed_mm,
    packed_linear=packed.packed_linear,
)
