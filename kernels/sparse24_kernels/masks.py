"""N:M masks by magnitude, masks as packed bits, and the number of entries in which two masks differ.

A mask is bool of the weight's shape or, eight times smaller, its packed bits: every function takes either.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import reference
from .checks import check_device, check_groups, check_is, check_pattern, check_size, described
from .dispatch import implementation
from .formats import empty_mask, mask_bytes
from .operators import register


def nm_mask(weight: Tensor, n: int = 2, m: int = 4, dim: int = -1, packed: bool = False) -> Tensor:
    """Mark the `n` largest magnitudes in each group of `m` along `dim`.

    Args:
        weight: fp64, fp32, bf16 or fp16, any shape; the size of `dim` must be a multiple of `m`.
        n: entries to keep of each group, 0 < n < m.
        m: size of a group.
        dim: the dimension that groups run along.
        packed: return the mask as packed bits, those of `pack_bits`.

    Returns:
        bool, shape of `weight`, exactly `n` of every `m` true; or its packed bits. Ties keep the lower index, NaN
        counts as largest.

    Raises:
        ValueError: a pattern outside 0 < n < m, or a size that `m` does not divide.

    Reference: SR-STE (arXiv 2102.04010), section 3.

    Examples:
        >>> nm_mask(torch.tensor([0.1, -3.0, 2.0, 1.0]))
        tensor([False,  True,  True, False])
    """
    check_pattern("nm_mask", n, m)
    check_is(bool, "nm_mask", packed=packed)
    return _nm_mask(weight, n, m, check_groups("nm_mask", weight, m, dim), packed)


def pack_bits(mask: Tensor) -> Tensor:
    """Store a mask in an eighth of its memory, eight entries in a byte.

    Args:
        mask: bool `[..., K]`, with at least one dimension.

    Returns:
        uint8 `[..., ceil(K/8)]`. Bit j of byte i is element 8i + j, so the lowest bit is the first element. Bits beyond
        K are 0.

    Raises:
        ValueError: no bool tensor, or one without dimensions.

    Examples:
        >>> pack_bits(torch.tensor([True, False, True, True]))
        tensor([13], dtype=torch.uint8)
    """
    check_is(Tensor, "pack_bits", mask=mask)
    if mask.dtype != torch.bool or not mask.dim():
        raise ValueError(f"pack_bits takes a bool mask with a last dimension, got {mask.dtype} {tuple(mask.shape)}")
    return reference.masks.pack_bits(mask)


def unpack_bits(packed: Tensor, size: int) -> Tensor:
    """The bool mask that `pack_bits` packed.

    Args:
        packed: uint8 `[..., ceil(size/8)]`.
        size: of the mask's last dimension, which its bytes do not tell.

    Returns:
        bool `[..., size]`.

    Raises:
        ValueError: no uint8 tensor with that many bytes in its last dimension, or a negative size.
    """
    check_is(Tensor, "unpack_bits", packed=packed)
    check_size("unpack_bits", size=size)
    if packed.dtype != torch.uint8 or not packed.dim() or packed.shape[-1] != mask_bytes(size):
        raise ValueError(f"unpack_bits takes uint8 [..., ceil(size / 8)], got {described(packed)} and size={size}")
    return reference.masks.unpack_bits(packed, size)


def count_flips(before: Sequence[Tensor], after: Sequence[Tensor]) -> Tensor:
    """The number of entries in which masks differ, pair by pair: int64 `[len(before)]`, on the first mask's device.

    Masks are bool or packed bits (`pack_bits`), of any shapes; those of a pair agree in shape, dtype and device.
    ValueError otherwise.
    """
    for what, masks in (("before", before), ("after", after)):
        if not isinstance(masks, (list, tuple)):  # the rows of one tensor would pass for masks
            raise ValueError(f"count_flips: {what}={described(masks)}: must be a list of tensors")
        check_is(Tensor, "count_flips", **{f"{what}[{i}]": mask for i, mask in enumerate(masks)})
    if len(before) != len(after):
        raise ValueError(f"count_flips needs as many masks before as after, got {len(before)} and {len(after)}")
    bits_set, counts = torch.tensor([byte.bit_count() for byte in range(256)], device="cpu"), []
    for old, new in zip(before, after):
        fits = (old.shape, old.dtype) == (new.shape, new.dtype) and old.dtype in (torch.bool, torch.uint8)
        if not fits or not old.dim():
            got = f"{described(old)} and {described(new)}"
            raise ValueError(f"count_flips needs two masks of one shape, bool or packed bits, got {got}")
        check_device("count_flips", old, new)
        different = old ^ new
        flips = different if different.dtype == torch.bool else bits_set.to(old.device)[different.long()]
        counts.append(flips.sum().to(before[0].device))
    return torch.stack(counts) if counts else torch.zeros(0, dtype=torch.int64, device="cpu")


@register("sparse24::nm_mask", lambda weight, n, m, dim, packed: empty_mask(weight, packed))
def _nm_mask(weight: Tensor, n: int, m: int, dim: int, packed: bool) -> Tensor:
    return implementation("nm_mask", weight)(weight, n, m, dim, packed)
