"""Packed matrices: 2:4 matrices without their zeros, made, rounded to int8, and made dense again, with the gradient of
that."""

import torch
from torch import Tensor

from . import reference
from .checks import check_device, check_floating, check_groups, check_is, check_packed, described
from .formats import SCALED, Packed, scale_columns
from .gemm.operand import unpack
from .prune import prune_forms


def pack_nm(weight: Tensor) -> Packed:
    """Store a matrix that is 2:4 along its last dimension without its zeros.

    Of a matrix that is not 2:4 the two largest magnitudes of every four are stored.

    Args:
        weight: `[R, K]`, or a stack `[..., R, K]`, fp64, fp32, bf16 or fp16; K must be a multiple of 8.

    Returns:
        Values `[..., R, K/2]` in the dtype of `weight`, and their indices.

    Raises:
        ValueError: no matrix of floating numbers, or a K that is no multiple of 8.

    Examples:
        >>> weight = nm_prune(torch.randn(2, 8))
        >>> packed = pack_nm(weight)
        >>> packed.values.shape, packed.indices.shape
        (torch.Size([2, 4]), torch.Size([2, 1]))
        >>> torch.equal(unpack_nm(packed), weight)
        True
    """
    check_floating("pack_nm", weight=weight)
    if weight.dim() < 2:
        raise ValueError(f"pack_nm needs a matrix or a stack of matrices, got shape {tuple(weight.shape)} as weight")
    check_groups("pack_nm", weight, 8, -1)
    values, indices, _ = prune_forms(weight.flatten(0, -2), ["packed"])[0]
    above = weight.shape[:-1]
    return Packed(values.view(*above, values.shape[1]), indices.view(*above, indices.shape[1]))


def quantize_packed(packed: Packed) -> Packed:
    """Round the values of a packed matrix to int8, with a scale for each row and 128 consecutive elements.

    A scale is the group's largest magnitude / 127, rounded to the matrix's dtype before values are divided by it. What
    `unpack_nm` makes of the result is rounded to the same values and scales again, where these are not subnormal.

    Args:
        packed: what `pack_nm` made of a finite fp64, fp32, bf16 or fp16 matrix. What has scales already is returned.

    Returns:
        int8 values `[..., R, K/2]`, the same indices, and scales `[..., R, ceil(K/128)]` in the dtype of the values.
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
    values, half = packed.values, SCALED // 2
    if not bool(values.isfinite().all()):
        raise ValueError("quantize_packed takes finite values, not NaN or inf")
    groups = scale_columns(2 * values.shape[-1])
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    padded = torch.nn.functional.pad(wide, (0, groups * half - values.shape[-1])).unflatten(-1, (groups, half))
    scales = _scales(padded.abs().amax(-1), values.dtype)
    steps = torch.where(scales > 0, scales, 1).to(wide.dtype)[..., None]
    rounded = (padded / steps).round_().clamp_(-127, 127).to(torch.int8)
    return Packed(rounded.flatten(-2)[..., : values.shape[-1]].contiguous(), packed.indices, scales)


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
        packed: values `[..., R, K/2]` and indices `[..., R, K/8]`; the values may be int8 with scales.

    Returns:
        `[..., R, K]` in the dtype of the values, or of the scales.

    Raises:
        ValueError: shapes, dtypes or devices of values, indices and scales that do not fit each other.
    """
    check_packed("unpack_nm", packed)
    values, indices, scales = packed
    dense = unpack(values.flatten(0, -2), indices.flatten(0, -2), None if scales is None else scales.flatten(0, -2))
    return dense.view(*values.shape[:-1], 2 * values.shape[-1])


def gather_nm(matrix: Tensor, indices: Tensor) -> Tensor:
    """The elements of a matrix at the places of a packed one: the gradient of `unpack_nm` for its values.

    Plain PyTorch on every device.

    Args:
        matrix: `[R, K]`, fp64, fp32, bf16 or fp16, any strides.
        indices: uint8 `[R, K/8]` of a `Packed`.

    Returns:
        `[R, K/2]` in the dtype of `matrix`, in the order of the packed values.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit each other.

    Examples:
        >>> packed = pack_nm(nm_prune(torch.randn(2, 8)))
        >>> torch.equal(gather_nm(unpack_nm(packed), packed.indices), packed.values)
        True
    """
    check_floating("gather_nm", matrix=matrix)
    check_is(Tensor, "gather_nm", indices=indices)
    shape = (matrix.shape[0], matrix.shape[1] // 8) if matrix.dim() == 2 and not matrix.shape[1] % 8 else None
    if tuple(indices.shape) != shape or indices.dtype != torch.uint8:
        got = f"{described(matrix)} and {described(indices)}"
        raise ValueError(f"gather_nm takes a matrix [R, K] and uint8 indices [R, K/8], got {got}")
    check_device("gather_nm", matrix, indices)
    return reference.packed.gather_nm(matrix, indices)
