"""A packed matrix made dense again, the elements at its places, and a linear layer with a packed weight."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..formats import SCALED
from .masks import integer_of

CHUNK = 1 << 17
"""Values that are unpacked at a time: their places, int64, are 1 MB and stay in the cache."""


def scaled(values: Tensor, scales: Tensor) -> Tensor:
    """int8 `[R, K/2]` times scales `[R, ceil(K/128)]` -> the products, rounded once to the scales' dtype."""
    wide = torch.promote_types(scales.dtype, torch.float32)
    each = scales.to(wide).repeat_interleave(SCALED // 2, 1)[:, : values.shape[1]]
    return (values.to(wide) * each).to(scales.dtype)


def unpack_nm(values: Tensor, indices: Tensor, scales: Tensor | None = None) -> Tensor:
    """Values `[R, K/2]` and indices `[R, K/8]`, of int8 values with scales -> dense `[R, K]` with zeros."""
    rows, half = values.shape
    like = values if scales is None else scales
    dense = values.new_zeros(rows, half * 2, dtype=integer_of(like))
    for some, columns in _columns(indices):
        part = values[some] if scales is None else scaled(values[some], scales[some])
        dense[some].scatter_(1, columns, part.view(dense.dtype))
    return dense.view(like.dtype)


def gather_nm(matrix: Tensor, indices: Tensor) -> Tensor:
    """The elements of `[R, K]` at the places of indices `[R, K/8]` -> `[R, K/2]`."""
    values = matrix.new_empty(matrix.shape[0], matrix.shape[1] // 2)
    for some, columns in _columns(indices):
        values[some] = matrix[some].gather(1, columns)
    return values


def _columns(indices: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """For some rows of indices `[R, K/8]` at a time, the column of each value: int64 `[rows, K/2]`."""
    rows, half = indices.shape[0], indices.shape[1] * 4
    bytes_ = torch.arange(256, device=indices.device)
    nibbles = torch.stack([bytes_ & 15, bytes_ >> 4], -1)
    places = torch.stack([nibbles & 3, nibbles >> 2], -1)  # of the four values that belong to each byte, in their group
    places = (places + torch.tensor([[0], [4]], device=indices.device)).view(256, 4)
    first = torch.arange(0, 2 * half, 8, device=indices.device).repeat_interleave(4)
    step = max(1, CHUNK // max(half, 1))
    for top in range(0, rows, step):
        some = slice(top, min(top + step, rows))
        yield some, places.index_select(0, indices[some].flatten().int()).view(some.stop - top, half).add_(first)


def packed_linear(
    x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, scales: Tensor | None = None
) -> Tensor:
    """`[T, K]` times a packed `[R, K]`, plus a bias `[R]` -> `[T, R]`."""
    return torch.nn.functional.linear(x, unpack_nm(values, indices, scales), bias)
