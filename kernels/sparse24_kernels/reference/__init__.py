"""The specification: every operation in plain PyTorch, on any device, in fp32, or fp64 for fp64.

These functions define what the library computes. They run on CPUs, and the tests compare every kernel with them: the
package `gpu` has the same modules with the same functions and arguments. A *group* is M consecutive elements along
`dim`.

Cases that the papers leave open have one result in every function:

* ties keep the element with the lower index, and exactly N of M are kept;
* a NaN counts as larger than any magnitude, so it is kept and stays visible;
* a zero is written as +0.0, never -0.0 (some compressors of sparse matrices count -0.0 as a value).
"""

from . import decay, fp8, gated, masks, mvue, packed, prune, transposable

__all__ = ["decay", "fp8", "gated", "masks", "mvue", "packed", "prune", "transposable"]
