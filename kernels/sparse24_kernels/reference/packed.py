"""A packed matrix made dense again, and a linear layer with a packed weight."""

import torch
from torch import Tensor

from ..formats import SCALED
from .prune import integer_of

CHUNK = 1 << 17
"""Values that are unpacked at a time: their places, int64, are 1 MB and stay in the cache."""


def scaled(values: Tensor, scales: Tensor, group: int = SCALED // 2) -> Tensor:
    """int8 `[R, C]` times scales `[R, ceil(C/group)]` -> the products `[R, C]`, rounded once to the scales' dtype."""
    wide = torch.promote_types(scales.dtype, torch.float32)
    each = scales.to(wide).repeat_interleave(group, 1)[:, : values.shape[1]]
    return (values.to(wide) * each).to(scales.dtype)


def unpack_nm(values: Tensor, indices: Tensor, scales: Tensor | None = None) -> Tensor:
    """Values `[R, K/2]` and indices `[R, K/8]`, of int8 values with scales -> dense `[R, K]` with zeros."""
    (rows, half), size = values.shape, values.shape[1] * 2
    bytes_ = torch.arange(256, device=values.device)
    nibbles = torch.stack([bytes_ & 15, bytes_ >> 4], -1)
    places = torch.stack([nibbles & 3, nibbles >> 2], -1)  # of the four values that belong to each byte, in their group
    places = (places + torch.tensor([[0], [4]], device=values.device)).view(256, 4)
    first = torch.arange(0, size, 8, device=values.device).repeat_interleave(4)
    like = values if scales is None else scales
    dense = values.new_zeros(rows, size, dtype=integer_of(like))
    step = max(1, CHUNK // max(half, 1))
    for top in range(0, rows, step):
        some = slice(top, top + step)
        columns = places.index_select(0, indices[some].flatten().int()).view(-1, half).add_(first)
        part = values[some] if scales is None else scaled(values[some], scales[some])
        dense[some].scatter_(1, columns, part.view(dense.dtype))
    return dense.view(like.dtype)


def packed_linear(
    x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, scales: Tensor | None = None
) -> Tensor:
    """`[T, K]` times a packed `[R, K]`, plus a bias `[R]` -> `[T, R]`."""
    return torch.nn.functional.linear(x, unpack_nm(values, indices, scales), bias)
