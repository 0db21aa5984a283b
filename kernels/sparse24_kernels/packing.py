"""Packed matrices: 2:4 matrices without their zeros, made and made dense again."""

from torch import Tensor

from .checks import check_floating, check_groups, check_packed
from .formats import Packed
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
    values, indices = prune_forms(weight.flatten(0, -2), ["packed"])[0]
    above = weight.shape[:-1]
    return Packed(values.view(*above, values.shape[1]), indices.view(*above, indices.shape[1]))


def unpack_nm(packed: Packed) -> Tensor:
    """The dense matrix of a packed one, bit for bit, with +0.0 where nothing was stored.

    Args:
        packed: values `[..., R, K/2]` and indices `[..., R, K/8]`; the values may be FP8, too.

    Returns:
        `[..., R, K]` in the dtype of the values.

    Raises:
        ValueError: shapes, dtypes or devices of values and indices that do not fit each other.
    """
    check_packed("unpack_nm", packed)
    values, indices = packed
    return unpack(values.flatten(0, -2), indices.flatten(0, -2)).view(*values.shape[:-1], 2 * values.shape[-1])
