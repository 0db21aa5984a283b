"""A matrix packed and made dense again, and a linear layer with a packed weight."""

import torch
from torch import Tensor

from ..formats import FORMS, SCALED, form_shape
from .masks import integer_of, nm_mask, pack_bits, unpack_bits


def pack_nm(matrix: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    """The n largest magnitudes of every m in a row of `[R, K]`, in order -> values `[R, K*n/m]`, mask `[R, K/8]`."""
    mask = nm_mask(matrix, n, m, 1, packed=False)
    return select(matrix, mask, n, m), pack_bits(mask)


def select(matrix: Tensor, mask: Tensor, n: int, m: int) -> Tensor:
    """The elements of `[..., K]` that a mask keeps, n of every m in a row -> `[..., K*n/m]`."""
    shape = (*matrix.shape[:-1], matrix.shape[-1] * n // m)
    return matrix.new_empty(shape) if matrix.is_meta else matrix.masked_select(mask).view(shape)


def scaled(values: Tensor, scales: Tensor, k: int) -> Tensor:
    """int8 `[R, K*N/M]` times scales `[R, ceil(K/128)]` -> the products, rounded once to the scales' dtype."""
    wide = torch.promote_types(scales.dtype, torch.float32)
    each = scales.to(wide).repeat_interleave(SCALED * values.shape[1] // max(k, 1), 1)[:, : values.shape[1]]
    return (values.to(wide) * each).to(scales.dtype)


def unpack_nm(values: Tensor, mask: Tensor, scales: Tensor | None, m: int) -> Tensor:
    """Values `[R, K*N/M]` and mask `[R, K/8]`, of int8 values with scales -> dense `[R, K]` with zeros."""
    k = 8 * mask.shape[1]
    values = values if scales is None else scaled(values, scales, k)
    dense = values.new_zeros(len(mask), k, dtype=integer_of(values))  # as integers: values are only moved
    return dense.masked_scatter_(unpack_bits(mask, k), values.view(dense.dtype)).view(values.dtype)


def in_form(pruned: Tensor, form: str) -> Tensor:
    """A pruned matrix in one of `FORMS`, contiguous. Zeros fill up what keeps less than two of four."""
    matrix = pruned.t() if "transposed" in form else pruned
    if FORMS[form] is None:
        return matrix.clone(memory_format=torch.contiguous_format) if form == "transposed" else matrix.contiguous()
    if "sm90" in form:
        return for_sm90(matrix)
    mask = nm_mask((matrix != 0).to(matrix.dtype), 2, 4, 1, packed=False)
    parts = select(matrix, mask, 2, 4).view(-1), pack_bits(mask).view(-1).view(matrix.dtype)
    return torch.cat(parts).view(*form_shape(form, pruned.shape))


def for_sm90(matrix: Tensor) -> Tensor:
    """A 2:4 matrix `[R, K]` of 16-bit numbers, as Hopper's sparse tensor cores take it -> `[R, K * 9 / 16]`.

    First the values `[R, K/2]`, then their places, for each group of four in half a byte: the first, and 4 times the
    second. A byte has a group of row r, and in its high half that of row r + 8. Tiles of 64 rows and 8 groups follow
    each other along the rows; a tile has its bytes in the order of `permute` below. Found out on an H100 from what
    cuSPARSELt 0.8.0 makes of random matrices. In groups with fewer than two non-zeros it chooses other places.
    """
    rows, k = matrix.shape
    x = matrix.reshape(rows, k // 4, 4)
    _, kept1, kept2, kept3 = (x != 0).unbind(-1)  # where fewer than two are not zero, zeros fill up
    first = torch.where(kept2 & kept3, 2, torch.where(kept1 & (kept2 | kept3), 1, 0))
    second = torch.where(kept3, 3, torch.where(kept2, 2, 1))
    values = x.gather(-1, torch.stack([first, second], -1)).view(-1)
    # Rows: tile, two bits, r or r + 8, three bits. Groups: tile, and the bits 4, 2 and 1.
    places = (first | second << 2).to(torch.uint8).view(rows // 64, 4, 2, 8, k // 32, 2, 2, 2)
    low, high = places.permute(0, 4, 1, 3, 6, 7, 5, 2).unbind(-1)
    return torch.cat([values, (low | high << 4).reshape(-1).view(matrix.dtype)]).view(rows, k * 9 // 16)


def packed_mm(values: Tensor, mask: Tensor, dense: Tensor) -> Tensor:
    """A packed 2:4 `[R, K]` times `[K, N]` -> `[R, N]`."""
    return unpack_nm(values, mask, None, 4) @ dense


def packed_linear(
    x: Tensor, values: Tensor, mask: Tensor, scales: Tensor | None, m: int, bias: Tensor | None
) -> Tensor:
    """`[T, K]` times a packed `[R, K]`, plus a bias `[R]` -> `[T, R]`."""
    return torch.nn.functional.linear(x, unpack_nm(values, mask, scales, m), bias)
