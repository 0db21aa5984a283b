"""The functions of `reference` but FP8's as Triton kernels: same files, same names, same arguments.

With TRITON_INTERPRET=1 in the environment before the import, they run on CPU tensors in Triton's interpreter. That is
how the tests check them where there is no GPU.
"""

from . import decay, gated, masks, mvue, packed, prune, transposable

__all__ = ["decay", "gated", "masks", "mvue", "packed", "prune", "transposable"]
