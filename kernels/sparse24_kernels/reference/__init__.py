"""The specification: every operation in plain PyTorch, on any device, at fp32 or better.

These functions define what the library computes. They are the CPU path, and the oracle that every kernel in the room
next door (`gpu`, same files, same names, same arguments) is tested against. A *group* is M consecutive elements along
`dim`.

Results that the papers leave open are fixed here, for every function:

* ties keep the element with the lower index, and exactly N of M are kept;
* a NaN counts as larger than any magnitude, so it is kept and stays visible;
* a zero is written as +0.0, never -0.0 (some sparse compressors count -0.0 as a value).
"""

from . import decay, fp8, gated, masks, mvue, prune, transposable

__all__ = ["decay", "fp8", "gated", "masks", "mvue", "prune", "transposable"]
