"""Products on Nvidia's sparse tensor cores, through torch's two cuSPARSELt operators. The only file that calls them.

`product = sparse @ dense`, where `sparse` `[m, k]` is 2:4 along k and compressed, and `dense` is `[k, n]`. What torch's
operators leave to the caller, and this file takes care of:

* a compressed matrix was flat, its size that of the formula, and m derived from it; since torch 2.10 it has m rows, and
  the size that the library wants, which pads small and odd matrices (pytorch PR 163125);
* a dense operand that is not contiguous is *taken* for the transpose of one that is, whatever its strides;
* sizes must be multiples of 16, or the library refuses (m, k) or is slow (n): n is padded with zeros here;
* the arguments for split-k have had two signatures;
* neither operator says what it runs on, and some algorithm ids return wrong numbers: see `tuner/`.
"""

import operator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

MULTIPLE = 16
"""What m and k must be multiples of in fp16 and bf16; n is padded to it."""

UNPADDED = 128
"""Multiples of this are never padded (torch's own kernels for Ampere's layout ask for them)."""

DTYPES = (torch.bfloat16, torch.float16)


class Algorithm(NamedTuple):
    """One way to run a product. What an id means changes with the library's version and the device."""

    id: int = 0
    split_k: int = 1
    split_k_mode: int = -1


class Layout(NamedTuple):
    """Where the indices of a compressed matrix `[m, k]` lie, in units of 16 bits from the first (see `layout.py`).

    `rows` int32 `[m]`, `units` int32 `[k / 16]`: the indices of row r, elements 16 u to 16 u + 15, are unit
    `rows[r] + units[u]`. Tensors on the matrix's device.
    """

    rows: Tensor
    units: Tensor


class Problem(NamedTuple):
    """One product's shape: what an algorithm is chosen by.

    `dense_is_column_major`: the dense operand `[k, n]` is the transpose of a contiguous `[n, k]`, as activations are.
    `transposed`: the result is wanted as a contiguous `[n, m]`.
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype
    dense_is_column_major: bool
    transposed: bool


@torch.compiler.assume_constant_result  # a graph keeps the answer; looking inside, it would not find the cache
def why_not(device: torch.device) -> str | None:
    """Why cuSPARSELt cannot run on `device`, or None where it can."""
    return _why_not(device)


@cache
def _why_not(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"cuSPARSELt needs a CUDA device, not {device.type}"
    if torch.version.hip is not None:
        return "cuSPARSELt needs an Nvidia GPU"
    if not torch.backends.cusparselt.is_available():
        return "this build of torch has no cuSPARSELt"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"sparse tensor cores need compute capability 8.0 or more: {torch.cuda.get_device_name(device)}"
    return None


def why_not_matrix(m: int, k: int, dtype: torch.dtype) -> str | None:
    """Why a 2:4 matrix `[m, k]` cannot be compressed, or None where it can."""
    if dtype not in DTYPES:
        return f"the sparse products run in bf16 and fp16, not {dtype}"
    multiple = MULTIPLE if _sizes_are_the_librarys() else UNPADDED
    if m % multiple or k % multiple or not m or not k:
        return f"cuSPARSELt needs multiples of {multiple}, not {m} x {k}"
    return None


@torch.compiler.assume_constant_result
def _sizes_are_the_librarys() -> bool:
    """Whether torch makes room for padding; older ones let the library write beyond what they have made."""
    return torch.__version__ >= (2, 10)


def version() -> int | None:
    """The library's version as torch tells it, such as 801 for 0.8.1, or None without the library."""
    return torch.backends.cusparselt.version() if torch.backends.cusparselt.is_available() else None


def is_slow_on(device: torch.device) -> bool:
    """Whether this version is known to be slow on Hopper and Ada: 0.8.0, of CUDA 13 builds of torch up to 2.11."""
    return version() == 800 and torch.cuda.get_device_capability(device) in ((8, 9), (9, 0))


@torch.library.custom_op("sparse24::cslt_compress", mutates_args=())
def compress(matrix: Tensor) -> Tensor:
    """A row-major matrix `[m, k]` that is 2:4 along k, in the library's own layout: `[m, compressed_columns]`.

    Rows are not rows of the matrix. The layout belongs to this device and library version: never save it.
    """
    m, k = matrix.shape
    compressed = torch._cslt_compress(matrix.contiguous()).view(m, -1)
    _columns[size_key(m, k, matrix.dtype, matrix.device)] = compressed.shape[1]
    return compressed


_columns: dict[tuple, int] = {}


def compressed_columns(m: int, k: int, dtype: torch.dtype, device: torch.device) -> int:
    """Columns of a compressed `[m, k]`: 9 k / 16, or what the library was seen to make of that size."""
    return _columns.get(size_key(m, k, dtype, device), k * 9 // 16)


def size_key(m: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[int, int, torch.dtype, torch.device]:
    """What is known of a size is kept by this: "cuda" becomes the device that it stands for, as in a tensor's."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return operator.index(m), operator.index(k), dtype, device  # symbolic sizes of a graph have no hash


@compress.register_fake
def _(matrix: Tensor) -> Tensor:
    return matrix.new_empty(len(matrix), compressed_columns(*matrix.shape, matrix.dtype, matrix.device))


@torch.library.custom_op("sparse24::cslt_mm", mutates_args=())
def matmul(
    compressed: Tensor,
    dense: Tensor,
    bias: Tensor | None,
    transposed: bool,
    algorithm: int,
    split_k: int,
    split_k_mode: int,
) -> Tensor:
    """`sparse @ dense (+ bias)`, as `[m, n]` or, transposed, as `[n, m]`; row-major either way.

    Args:
        compressed: of `compress`. dense: `[k, n]`, row-major or the transpose of that (another layout is copied).
        bias: `[m]` in the operands' dtype, or None.
        transposed: the layout of the result. algorithm, split_k, split_k_mode: see `Algorithm`.
    """
    (m, columns), (k, n) = compressed.shape, dense.shape
    if columns != compressed_columns(m, k, compressed.dtype, compressed.device):
        raise ValueError(f"cslt_mm: compressed {m} x {columns} is no matrix of {m} x {k}")
    if not compressed.dtype == dense.dtype == (dense.dtype if bias is None else bias.dtype):
        # The library would take the bits of one for those of another.
        raise RuntimeError(f"cslt_mm: operands of one dtype, not {compressed.dtype}, {dense.dtype} and bias {bias}")
    if not n:
        return dense.new_empty((0, m) if transposed else (m, 0))
    # One column is both; padding makes it what its problem was tuned for.
    column_major = dense.t().is_contiguous() and (transposed or not dense.is_contiguous())
    dense = _aligned(dense if column_major else dense.contiguous())
    bias = None if bias is None else _aligned(bias.contiguous())
    missing = -n % MULTIPLE
    if missing:
        pad = torch.nn.functional.pad
        dense = pad(dense.t(), (0, 0, 0, missing)).t() if column_major else pad(dense, (0, missing))
    result = torch._cslt_sparse_mm(
        compressed,
        dense,
        bias=bias,
        transpose_result=transposed,
        alg_id=algorithm,
        **_split_k_arguments(split_k, split_k_mode),
    )
    if missing:
        result = result[:n] if transposed else result[:, :n].contiguous()
    return result


def _aligned(tensor: Tensor) -> Tensor:
    """At an address that is a multiple of 16, which torch promises the library of every operand."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


@matmul.register_fake
def _(compressed, dense, bias, transposed, algorithm, split_k, split_k_mode):
    m, n = compressed.shape[0], dense.shape[1]
    return dense.new_empty((n, m) if transposed else (m, n))


@cache
def _split_k_argument_names() -> frozenset[str]:
    schema = torch.ops.aten._cslt_sparse_mm.default._schema
    return frozenset(argument.name for argument in schema.arguments)


def _split_k_arguments(split_k: int, split_k_mode: int) -> dict[str, int | bool]:
    """Torch renamed `split_k_one_kernel` (bool) to `split_k_mode` (-1: the library's default)."""
    if split_k == 1:
        return {}
    if "split_k_mode" in _split_k_argument_names():
        return {"split_k": split_k, "split_k_mode": split_k_mode}
    return {"split_k": split_k, "split_k_one_kernel": split_k_mode == 0}
