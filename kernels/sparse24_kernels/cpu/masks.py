"""2:4 masks by magnitude, by the kernels for CPUs."""

from torch import Tensor

from ..formats import empty_mask
from .prune import run


def nm_mask(weight: Tensor, n: int, m: int, dim: int, packed: bool) -> Tensor:
    """Keep the two largest magnitudes of each group of four: bool, same shape as `weight`, or its packed bits."""
    mask = empty_mask(weight, packed=False)
    run("nm-mask", weight, mask, dim)
    return pack_bits(mask) if packed else mask


def pack_bits(mask: Tensor) -> Tensor:
    """bool `[..., K]` -> uint8 `[..., ceil(K/8)]`; bit j of byte i is element 8i + j, missing elements are 0."""
    bits = empty_mask(mask, packed=True)
    run("pack-bits", mask, bits)
    return bits
