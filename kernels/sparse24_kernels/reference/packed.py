"""A packed matrix made dense again, and a linear layer with a packed weight."""

import torch
from torch import Tensor

from .prune import integer_of

CHUNK = 1 << 17
"""Values that are unpacked at a time: their places, int64, are 1 MB and stay in the cache."""


def unpack_nm(values: Tensor, indices: Tensor) -> Tensor:
    """Values `[R, K/2]` and indices `[R, K/8]` -> dense `[R, K]` with zeros."""
    (rows, half), size = values.shape, values.shape[1] * 2
    bytes_ = torch.arange(256, device=values.device)
    nibbles = torch.stack([bytes_ & 15, bytes_ >> 4], -1)
    places = torch.stack([nibbles & 3, nibbles >> 2], -1)  # of the four values that belong to each byte, in their group
    places = (places + torch.tensor([[0], [4]], device=values.device)).view(256, 4)
    first = torch.arange(0, size, 8, device=values.device).repeat_interleave(4)
    integers = values.view(integer_of(values))
    dense = integers.new_zeros(rows, size)
    step = max(1, CHUNK // max(half, 1))
    for top in range(0, rows, step):
        some = slice(top, top + step)
        columns = places.index_select(0, indices[some].flatten().int()).view(-1, half).add_(first)
        dense[some].scatter_(1, columns, integers[some])
    return dense.view(values.dtype)


def packed_linear(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None) -> Tensor:
    """`[T, K]` times a packed `[R, K]`, plus a bias `[R]` -> `[T, R]`."""
    return torch.nn.functional.linear(x, unpack_nm(values, indices), bias)
