"""Transposable 2:4 masks of largest L1 norm, by the kernels for CPUs."""

from torch import Tensor

from ..formats import empty_mask
from .masks import pack_bits
from .prune import run


def transposable_mask(weight: Tensor, n: int, m: int, solver: str, packed: bool) -> Tensor:
    """The best of the 90 patterns for each 4 x 4 tile of `[R, C]`, the first of equal ones as the reference has it."""
    mask = empty_mask(weight, packed=False)
    run("transposable", weight, mask)
    return pack_bits(mask) if packed else mask
