"""Kernels for CPUs in C++: GEMMs with packed weights, and pruning.

    native/       the C++: one path for each kind of CPU, such as AVX-512 or NEON, and a portable one
    build.py      compiles it; needs nothing but a compiler and Python's standard library
    library.py    loads it, built in the wheel or on first use, or says why there is none
    the rest      the operators, called through plain C functions on torch's thread pool

Importing this package compiles and loads nothing.
"""

OPERATORS = frozenset(
    {
        "decay.masked_decay_",
        "masks.nm_mask",
        "mvue.mvue",
        "packed.packed_linear",
        "packed.unpack_nm",
        "prune.prune",
        "transposable.transposable_mask",
    }
)
"""The operators of `reference` that have kernels here, as "module.function"."""
