"""The sparse operand of a GEMM as backends store it, and the operator that makes packed weights dense."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch import implementation


class Operand(NamedTuple):
    """A 2:4 matrix `[m, k]` in the form that one backend multiplies by: dense math by its values, cuSPARSELt by the
    compressed matrix as values, `"packed"` by the three tensors of a `Packed`."""

    values: Tensor
    indices: Tensor | None = None
    scale: Tensor | None = None


@torch.library.custom_op("sparse24::unpack_nm", mutates_args=())
def unpack(values: Tensor, indices: Tensor, scales: Tensor | None = None) -> Tensor:
    """The dense `[R, K]` of values `[R, K/2]`, indices `[R, K/8]` and, of int8 values, scales `[R, ceil(K/128)]`."""
    return implementation("unpack_nm", indices)(values, indices, scales)


@unpack.register_fake
def _(values: Tensor, indices: Tensor, scales: Tensor | None = None) -> Tensor:
    return (values if scales is None else scales).new_empty(values.shape[0], values.shape[1] * 2)
