"""The functions of `reference` as Triton kernels: same files, same names, same arguments.

With TRITON_INTERPRET=1 in the environment before this is imported, they run on CPU tensors in Triton's interpreter;
that is how the tests prove them where there is no GPU.
"""

from . import decay, fp8, gated, masks, mvue, prune, transposable

__all__ = ["decay", "fp8", "gated", "masks", "mvue", "prune", "transposable"]
