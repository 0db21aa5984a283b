"""The functions of `reference` as Triton kernels: same files, same names, same arguments. FP8, masked decay and
counting flips run in PyTorch everywhere.

With TRITON_INTERPRET=1 in the environment before the import, they run on CPU tensors in Triton's interpreter. That is
how the tests check them where there is no GPU.
"""

from . import gated, masks, mvue, packed, prune, transposable

__all__ = ["gated", "masks", "mvue", "packed", "prune", "transposable"]
