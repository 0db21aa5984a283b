"""The operators of `reference` as Triton kernels. FP8, S-STE's scale and counting flips run in PyTorch on GPUs.

With TRITON_INTERPRET=1 in the environment before the import, they run on CPU tensors in Triton's interpreter. That is
how the tests check them where there is no GPU.
"""

from ..operators import Operators
from . import decay, gated, masks, mvue, packed, prune, transposable

OPERATORS = Operators(
    nm_mask=masks.nm_mask,
    transposable_mask=transposable.transposable_mask,
    prune=prune.prune,
    mvue=mvue.mvue,
    masked_decay_=decay.masked_decay_,
    gated_activation=gated.gated_activation,
    gated_activation_backward=gated.gated_activation_backward,
    unpack_nm=packed.unpack_nm,
    packed_linear=packed.packed_linear,
)
