"""Linear layers with packed weights, and packed weights made dense, by the kernels for CPUs."""

import torch
from torch import Tensor

from .. import reference
from ..formats import scale_columns
from .library import DTYPES, loaded


def packed_linear(
    x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None, scales: Tensor | None = None
) -> Tensor:
    """`[T, K]` times a packed `[R, K]`, whose int8 values have scales, plus a bias `[R]` -> `[T, R]`.

    Sums are fp32. Their order is the path's (see native/), and the same in every call and for any number of threads.
    Where a weight is zero, inf and NaN of x may not show. Few tokens and int8 values: AVX-512 with VNNI rounds x to
    8 bits, with a scale for each token and 128 inputs. More tokens: what multiplies in bf16 rounds the weight to it.
    """
    _check(x, values, indices, bias, scales)
    x, values, indices = x.contiguous(), values.contiguous(), indices.contiguous()
    bias, scales = (None if tensor is None else tensor.contiguous() for tensor in (bias, scales))
    (tokens, k), rows = x.shape, len(values)
    y = x.new_empty(tokens, rows)
    loaded().call(
        "sparse24_linear",
        x.data_ptr(),
        values.data_ptr(),
        indices.data_ptr(),
        None if scales is None else scales.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        tokens,
        rows,
        k,
        DTYPES[x.dtype],
    )
    return y


def unpack_nm(values: Tensor, indices: Tensor, scales: Tensor | None = None) -> Tensor:
    """Values `[R, K/2]` and indices `[R, K/8]`, of int8 values with scales -> dense `[R, K]` with zeros."""
    dtype = values.dtype if scales is None else scales.dtype
    if dtype not in DTYPES:  # fp64
        return reference.packed.unpack_nm(values, indices, scales)
    _check(None, values, indices, None, scales)
    values, indices = values.contiguous(), indices.contiguous()
    scales = None if scales is None else scales.contiguous()
    dense = (values if scales is None else scales).new_empty(len(values), 2 * values.shape[1])
    loaded().call(
        "sparse24_unpack",
        values.data_ptr(),
        indices.data_ptr(),
        None if scales is None else scales.data_ptr(),
        dense.data_ptr(),
        len(values),
        dense.shape[1],
        DTYPES[dense.dtype],
    )
    return dense


def _check(x: Tensor | None, values: Tensor, indices: Tensor, bias: Tensor | None, scales: Tensor | None) -> None:
    """Raise ValueError for sizes, dtypes or devices with which the kernels would read what is not theirs."""
    rows, half = values.shape if values.dim() == 2 else (0, 1)
    dtype = values.dtype if scales is None else scales.dtype
    fits = half % 4 == 0 and indices.shape == (rows, half // 4) and indices.dtype == torch.uint8
    fits &= scales is None or (values.dtype == torch.int8 and scales.shape == (rows, scale_columns(2 * half)))
    fits &= values.is_cpu and indices.is_cpu and (scales is None or scales.is_cpu)
    fits &= x is None or (x.dim() == 2 and x.shape[1] == 2 * half and x.dtype == dtype and x.is_cpu)
    fits &= bias is None or (bias.shape == (rows,) and bias.dtype == dtype and bias.is_cpu)
    if not fits:
        given = [
            None if tensor is None else (str(tensor.device), tensor.dtype, *tensor.shape)
            for tensor in (x, values, indices, bias, scales)
        ]
        raise ValueError(f"x, values, indices, bias and scales do not fit each other, or are not on the CPU: {given}")
