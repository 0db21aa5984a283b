"""Kernels for CPUs in C++: GEMMs with packed weights, and pruning.

    native/       the C++: one path for each kind of CPU, such as AVX-512 or NEON, and a portable one
    build.py      compiles it; needs nothing but a compiler and Python's standard library
    library.py    loads it, built in the wheel or on first use, or says why there is none
    the rest      the operators, called through plain C functions on torch's thread pool

Importing this package compiles and loads nothing.
"""

from ..operators import Operators
from . import decay, masks, mvue, packed, prune, transposable

OPERATORS = Operators(
    nm_mask=masks.nm_mask,
    transposable_mask=transposable.transposable_mask,
    prune=prune.prune,
    mvue=mvue.mvue,
    masked_decay_=decay.masked_decay_,
    unpack_nm=packed.unpack_nm,
    packed_mm=packed.packed_mm,
    packed_linear=packed.packed_linear,
)
