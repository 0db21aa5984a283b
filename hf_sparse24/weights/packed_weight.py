"""Tensors in packed form: made without loss, and checked after they were read from a file."""

import sparse24_kernels as kernels
import torch
from sparse24_kernels import Packed
from sparse24_kernels.checks import check_packed
from torch import Tensor

from ..metrics import all_finite
from .sparse_weight import SparseWeight
from .storage import PackedFrozen


def pack_exactly(weight: Tensor, input_dim: int) -> Packed | None:
    """A matrix, or a stack of them, in packed form; None where that would lose something."""
    weight = weight if input_dim == -1 else weight.transpose(-1, -2)
    packed = kernels.pack_nm(weight)
    return packed if torch.equal(kernels.unpack_nm(packed), weight) else None


def is_packable(weight: SparseWeight) -> bool:
    """Whether a weight has a packed form by its sizes: a byte has the indices of eight elements."""
    return weight.sizes[1] % 8 == 0


def packed_form(name: str, weight: SparseWeight, values: str) -> Packed | None:
    """What a sparse weight computes with, packed; None where its input size is no multiple of 8."""
    if not is_packable(weight):
        return None
    method = weight.method
    if isinstance(weight.storage, PackedFrozen):
        packed: Packed | None = weight.storage.whole_packed()
    else:
        packed = pack_exactly(weight.merged(), weight.input_dim)
    if packed is None and weight.parameters:
        merged = f"{list(weight.parameters)} of method {method.name!r} merged"
        raise ValueError(f"{name} is not {method.pattern} with {merged}: export with format='dense', which has all")
    if packed is None:
        raise ValueError(f"{name} has NaN, or is not {method.pattern} as method {method.name!r} prunes it")
    return kernels.quantize_packed(packed) if values == "int8" else packed


def wrong_packed(packed: Packed) -> str | None:
    """What is wrong with values `[..., out, in / 2]`, indices `[..., out, in / 8]` and scales that a file had."""
    try:
        check_packed("", packed)
    except ValueError:
        parts = [f"{what} {x.dtype} {tuple(x.shape)}" for what, x in packed._asdict().items() if x is not None]
        return f"these do not fit each other: {', '.join(parts)}"
    values, indices, scales = packed
    # Within four, the lower element comes first: two of them at one place would overwrite each other.
    if not all(bool(((group & 3) < (group >> 2)).all()) for group in (indices & 15, indices >> 4)):
        return "its indices are not in ascending order"
    if scales is None:
        return None if all_finite(values) else "NaN or inf in its values"
    if not (all_finite(scales) and bool((scales >= 0).all())):
        return "negative numbers, NaN or inf in its scales"
    return "-128 in its values, which are -127 to 127" if bool((values == -128).any()) else None
