"""The specification: every operation in plain PyTorch, on any device, in fp32, or fp64 for fp64.

These functions define what the library computes. The tests compare every kernel with them. A *group* is M consecutive
elements along `dim`.

Cases that the papers leave open have one result in every function:

* ties keep the element with the lower index, and exactly N of M are kept;
* a NaN counts as larger than any magnitude, so it is kept and stays visible;
* a zero is written as +0.0, never -0.0 (some compressors of sparse matrices count -0.0 as a value).
"""

from ..operators import Operators
from . import gated, masks, mvue, packed, prune, transposable

OPERATORS = Operators(
    nm_mask=masks.nm_mask,
    transposable_mask=transposable.transposable_mask,
    prune=prune.prune,
    mvue=mvue.mvue,
    masked_decay_=masks.masked_decay_,
    gated_activation=gated.gated_activation,
    gated_activation_backward=gated.gated_activation_backward,
    unpack_nm=packed.unpack_nm,
    packed_mm=packed.packed_mm,
    packed_linear=packed.packed_linear,
)
