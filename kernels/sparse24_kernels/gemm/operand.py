"""The sparse operand of a GEMM as backends store it, and the operator that makes packed weights dense."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch import implementation


class Operand(NamedTuple):
    """A 2:4 matrix `[m, k]` in the form that one backend multiplies by: dense math by its values, cuSPARSELt by the
    compressed matrix as values, `"packed"` by what a `Packed` has."""

    values: Tensor
    mask: Tensor | None = None
    scale: Tensor | None = None
    m: int = 4


@torch.library.custom_op("sparse24::unpack_nm", mutates_args=())
def unpack(values: Tensor, mask: Tensor, scales: Tensor | None = None, m: int = 4) -> Tensor:
    """The dense `[R, K]` of values `[R, K*N/M]`, a mask `[R, K/8]` and, of int8 values, scales `[R, ceil(K/128)]`."""
    return implementation("unpack_nm", mask)(values, mask, scales, m)


@unpack.register_fake
def _(values: Tensor, mask: Tensor, scales: Tensor | None = None, m: int = 4) -> Tensor:
    return (values if scales is None else scales).new_empty(mask.shape[0], mask.shape[1] * 8)
