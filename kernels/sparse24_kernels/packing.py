"""N:M matrices without their zeros: made, rounded to int8, and made dense again, with the gradient of that."""

import torch
from torch import Tensor

from . import reference
from .checks import check_device, check_floating, check_is, check_mask, check_packed, check_pattern, described
from .formats import SCALED, Packed, Pattern, scale_columns, unpackable
from .gemm.backend import unpack
from .masks import nm_mask, pack_bits, unpack_bits


def pack_nm(weight: Tensor, n: int = 2, m: int = 4, mask: Tensor | None = None) -> Packed:
    """Store a matrix that is N:M along its last dimension without its zeros.

    Of a matrix that is not N:M the n largest magnitudes of every m are stored.

    Args:
        weight: `[R, K]`, or a stack `[..., R, K]`, fp64, fp32, bf16 or fp16; K must be a multiple of 8 and of m.
        n: elements that are kept of each group, 0 < n < m.
        m: size of a group, which divides 64.
        mask: what is kept instead, bool of the weight's shape or packed bits. Where it keeps fewer than n of a group,
            the first others are kept too; of more, the first n.

    Returns:
        Values `[..., R, K * n / m]` in the dtype of `weight`, and their mask.

    Raises:
        ValueError: no matrix of floating numbers, or a pattern or a K that has no packed form.

    Examples:
        >>> weight = nm_prune(torch.randn(2, 32), n=16, m=32)
        >>> packed = pack_nm(weight, n=16, m=32)
        >>> packed.values.shape, packed.mask.shape
        (torch.Size([2, 16]), torch.Size([2, 4]))
        >>> torch.equal(unpack_nm(packed), weight)
        True
    """
    check_floating("pack_nm", weight=weight)
    if weight.dim() < 2:
        raise ValueError(f"pack_nm needs a matrix or a stack of matrices, got shape {tuple(weight.shape)} as weight")
    check_pattern("pack_nm", n, m)
    if reason := unpackable(Pattern(n, m), weight.shape[-1]):
        raise ValueError(f"pack_nm: {reason}")
    if mask is not None:
        check_mask("pack_nm", mask, weight)
        check_device("pack_nm", weight, mask)
        mask = mask if mask.dtype == torch.bool else unpack_bits(mask, weight.shape[-1])
    kept = nm_mask(weight if mask is None else mask.to(weight.dtype), n, m)
    values = reference.packed.select(weight, kept, n, m).add_(0.0)  # never -0.0
    return Packed(values, pack_bits(kept), None, m)


def quantize_packed(packed: Packed) -> Packed:
    """Round the values of a packed matrix to int8, with a scale for each row and 128 consecutive elements.

    A scale is the group's largest magnitude / 127, rounded to the matrix's dtype before values are divided by it. What
    `unpack_nm` makes of the result is rounded to the same values and scales again, where these are not subnormal.

    Args:
        packed: what `pack_nm` made of a finite fp64, fp32, bf16 or fp16 matrix. What has scales already is returned.

    Returns:
        int8 values, the same mask, and scales `[..., R, ceil(K/128)]` in the dtype of the values.
        The scale of a group of zeros is 0.

    Raises:
        ValueError: no packed matrix, NaN or inf.

    Examples:
        >>> packed = quantize_packed(pack_nm(torch.tensor([[1.0, 0, 0, -4.0, 0, 2.0, 0, 0]])))
        >>> packed.values
        tensor([[  32, -127,    0,   64]], dtype=torch.int8)
        >>> packed.scales
        tensor([[0.0315]])
    """
    check_packed("quantize_packed", packed)
    if packed.scales is not None:
        return packed
    values, k = packed.values, packed.columns
    size = SCALED * values.shape[-1] // k  # values that share a scale
    if not bool(values.isfinite().all()):
        raise ValueError("quantize_packed takes finite values, not NaN or inf")
    groups = scale_columns(k)
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    padded = torch.nn.functional.pad(wide, (0, groups * size - values.shape[-1])).unflatten(-1, (groups, size))
    scales = _scales(padded.abs().amax(-1), values.dtype)
    steps = torch.where(scales > 0, scales, 1).to(wide.dtype)[..., None]
    rounded = (padded / steps).round_().clamp_(-127, 127).to(torch.int8)
    return packed._replace(values=rounded.flatten(-2)[..., : values.shape[-1]].contiguous(), scales=scales)


def _scales(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in `dtype` for the largest magnitudes of groups."""
    limits = torch.finfo(dtype)
    scales = (largest / 127).clamp(max=limits.max / 128).to(dtype)  # 127 times a scale is finite
    # About 1/128 of bf16 scales do not survive x127 / 127: take the neighbour, which does.
    scales = ((127 * scales.to(largest)).to(dtype).to(largest) / 127).to(dtype)
    # Subnormal scales are coarse, and 0 in the end: one that is too small would cut the largest magnitudes off.
    smallest = limits.smallest_normal * limits.eps
    return torch.where(127.5 * scales.to(largest) < largest, scales.to(largest) + smallest, scales).to(dtype)


def unpack_nm(packed: Packed) -> Tensor:
    """The dense matrix of a packed one, bit for bit, with +0.0 where nothing was stored.

    Args:
        packed: of `pack_nm` or `quantize_packed`. Bits of its mask are trusted, and not counted.

    Returns:
        `[..., R, K]` in the dtype of the values, or of the scales.

    Raises:
        ValueError: shapes, dtypes or devices of values, mask and scales that do not fit each other.
    """
    check_packed("unpack_nm", packed)
    values, mask, scales, m = packed
    dense = unpack(values.flatten(0, -2), mask.flatten(0, -2), None if scales is None else scales.flatten(0, -2), m)
    return dense.view(*values.shape[:-1], packed.columns)


def gather_nm(matrix: Tensor, mask: Tensor) -> Tensor:
    """The elements of `[R, K]` at the places of a packed mask uint8 `[R, K/8]`, in the order of the packed values.

    This is the gradient of `unpack_nm` for the values, in plain PyTorch on every device. ValueError: shapes, dtypes or
    devices that do not fit each other.
    """
    check_floating("gather_nm", matrix=matrix)
    check_is(Tensor, "gather_nm", mask=mask)
    shape = (matrix.shape[0], matrix.shape[1] // 8) if matrix.dim() == 2 and not matrix.shape[1] % 8 else None
    if tuple(mask.shape) != shape or mask.dtype != torch.uint8:
        got = f"{described(matrix)} and {described(mask)}"
        raise ValueError(f"gather_nm takes a matrix [R, K] and a uint8 mask [R, K/8], got {got}")
    check_device("gather_nm", matrix, mask)
    return matrix.masked_select(unpack_bits(mask, matrix.shape[1])).view(len(matrix), -1)


def wrong_mask(packed: Packed) -> str | None:
    """The error in the mask of a packed matrix whose tensors fit each other; None where each group has N."""
    n = packed.m * packed.values.shape[-1] // packed.columns
    counts = unpack_bits(packed.mask, packed.columns).unflatten(-1, (-1, packed.m)).sum(-1, dtype=torch.uint8)
    return None if bool((counts == n).all()) else f"groups of {packed.m} that do not keep {n}"
