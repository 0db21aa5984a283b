"""2:4 masks by magnitude, by the kernels for CPUs."""

from torch import Tensor

from .. import reference
from ..formats import empty_mask
from .prune import LARGEST_M, run


def nm_mask(weight: Tensor, n: int, m: int, dim: int, packed: bool) -> Tensor:
    """Keep the n largest magnitudes of each group of m: bool, same shape as `weight`, or its packed bits."""
    if m > LARGEST_M:
        return reference.masks.nm_mask(weight, n, m, dim, packed)
    mask = empty_mask(weight, packed=False)
    run("nm-mask", weight, mask, dim, n, m)
    return pack_bits(mask) if packed else mask


def pack_bits(mask: Tensor) -> Tensor:
    """bool `[..., K]` -> uint8 `[..., ceil(K/8)]`; bit j of byte i is element 8i + j, missing elements are 0."""
    bits = empty_mask(mask, packed=True)
    run("pack-bits", mask, bits)
    return bits
