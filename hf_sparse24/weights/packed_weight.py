"""Tensors in packed form: made without loss, and checked after they were read from a file."""

import sparse24_kernels as kernels
import torch
from sparse24_kernels import Packed, Pattern
from sparse24_kernels.checks import check_packed
from sparse24_kernels.formats import unpackable
from sparse24_kernels.packing import wrong_mask
from torch import Tensor

from ..metrics import all_finite
from .sparse_weight import SparseWeight
from .storage import PackedFrozen


def pack_exactly(weight: Tensor, input_dim: int, pattern: Pattern) -> Packed | None:
    """A matrix, or a stack of them, in packed form; None where that would lose something."""
    weight = weight if input_dim == -1 else weight.transpose(-1, -2)
    packed = kernels.pack_nm(weight, *pattern)
    return packed if torch.equal(kernels.unpack_nm(packed), weight) else None


def not_packable(weight: SparseWeight) -> str | None:
    """Why a weight has no packed form, by its pattern and sizes; None where it has one."""
    return unpackable(weight.pattern, weight.sizes[1])


def packed_form(name: str, weight: SparseWeight, values: str) -> Packed | None:
    """The packed form of the weight that a layer computes with; None where it has none."""
    if not_packable(weight):
        return None
    method = weight.method
    if isinstance(weight.storage, PackedFrozen):
        packed: Packed | None = weight.storage.whole_packed()
    else:
        packed = pack_exactly(weight.merged(), weight.input_dim, weight.pattern)
    if packed is None and weight.parameters:
        merged = f"{list(weight.parameters)} of method {method.name!r} merged"
        raise ValueError(f"{name} is not {method.pattern} with {merged}: export with format='dense', which has all")
    if packed is None:
        raise ValueError(f"{name} has NaN, or is not {method.pattern} as method {method.name!r} prunes it")
    return kernels.quantize_packed(packed) if values == "int8" else packed


def wrong_packed(packed: Packed) -> str | None:
    """The fault of values, mask and scales that were read from a file; None where they are right."""
    try:
        check_packed("a packed weight", packed)
    except ValueError as error:
        return str(error)
    if wrong := wrong_mask(packed):
        return f"its mask has {wrong}"
    values, scales = packed.values, packed.scales
    if scales is None:
        return None if all_finite(values) else "NaN or inf in its values"
    if not (all_finite(scales) and bool((scales >= 0).all())):
        return "negative numbers, NaN or inf in its scales"
    return "-128 in its values, which are -127 to 127" if bool((values == -128).any()) else None
