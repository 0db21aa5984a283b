"""Kernels for CPUs in C++: GEMMs with packed weights, and pruning.

    native/       the C++: one path for each kind of CPU, such as AVX-512 or NEON, and a portable one
    build.py      compiles it; needs nothing but a compiler and Python's standard library
    library.py    loads it, built in the wheel or on first use, or says why there is none
    the rest      the operators, called through plain C functions on torch's thread pool

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
