"""Linear layers with packed weights, and packed weights made dense, by the kernels for CPUs."""

from torch import Tensor

from .. import reference
from ..checks import check_packed, described
from ..formats import STEP, Packed
from .library import DTYPES, addresses, loaded
from .memory import reused_memory


def packed_linear(
    x: Tensor, values: Tensor, mask: Tensor, scales: Tensor | None, m: int, bias: Tensor | None
) -> Tensor:
    """`[T, K]` times a packed `[R, K]`, whose int8 values have scales, plus a bias `[R]` -> `[T, R]`.

    Sums are fp32. Their order is the path's (see native/), and the same in every call and for any number of threads.
    Where a weight is zero, inf and NaN of x may not show. Few tokens and int8 values: AVX-512 with VNNI rounds x to
    8 bits, with a scale for each token and 128 inputs. More tokens: what multiplies in bf16 rounds the weight to it.
    """
    return _multiply(x, Packed(values, mask, scales, m), bias, False)


def packed_mm(values: Tensor, mask: Tensor, dense: Tensor) -> Tensor:
    """A packed 2:4 `[R, K]` times `[K, N]` -> `[R, N]`. Sums are those of `packed_linear` in fp32."""
    return _multiply(dense, Packed(values, mask), None, True)


def _multiply(x: Tensor, packed: Packed, bias: Tensor | None, is_product: bool) -> Tensor:
    each = _values_of_a_step(x.t() if is_product and x.dim() == 2 else x, packed, bias)
    x, values, mask = x.contiguous(), packed.values.contiguous(), packed.mask.contiguous()
    bias, scales = (None if tensor is None else tensor.contiguous() for tensor in (bias, packed.scales))
    (k, tokens), rows = x.shape if is_product else x.shape[::-1], len(values)
    y = reused_memory((rows, tokens) if is_product else (tokens, rows), x.dtype)
    tensors, sizes = addresses(x, values, mask, scales, bias, y), (tokens, rows, k, each, packed.m)
    loaded().call("sparse24_linear", *tensors, *sizes, DTYPES[x.dtype], is_product)
    return y


def unpack_nm(values: Tensor, mask: Tensor, scales: Tensor | None, m: int) -> Tensor:
    """Values `[R, K*N/M]` and mask `[R, K/8]`, of int8 values with scales -> dense `[R, K]` with zeros."""
    dtype = values.dtype if scales is None else scales.dtype
    if dtype not in DTYPES:  # fp64
        return reference.packed.unpack_nm(values, mask, scales, m)
    each = _values_of_a_step(None, Packed(values, mask, scales, m), None)
    values, mask = values.contiguous(), mask.contiguous()
    scales = None if scales is None else scales.contiguous()
    dense = values.new_empty(len(mask), 8 * mask.shape[1], dtype=dtype)
    loaded().call("sparse24_unpack", *addresses(values, mask, scales, dense), *dense.shape, each, DTYPES[dtype])
    return dense


def _values_of_a_step(x: Tensor | None, packed: Packed, bias: Tensor | None) -> int:
    """How many of `STEP` weights are kept; ValueError for sizes, dtypes or devices with which the kernels would read
    what is not theirs."""
    check_packed("a CPU's packed weight", packed)
    values = packed.values
    rows, fits = len(values), values.is_cpu and values.dim() == 2
    fits &= x is None or (x.dim() == 2 and x.shape[1] == packed.columns and x.dtype == packed.dtype and x.is_cpu)
    fits &= bias is None or (bias.shape == (rows,) and bias.dtype == packed.dtype and bias.is_cpu)
    if not fits:
        given = [None if each is None else (str(each.device), described(each)) for each in (x, values, bias)]
        raise ValueError(f"x, values and bias do not fit each other, or are not on the CPU: {given}")
    return STEP * values.shape[1] // packed.columns
