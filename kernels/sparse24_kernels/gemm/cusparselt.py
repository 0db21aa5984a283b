"""torch's two cuSPARSELt operators, which run on Nvidia's sparse tensor cores. The only module that calls them.

torch's operators leave some work to the caller, which is done here:

* A dense operand that is not contiguous is *taken* for the transpose of one that is, whatever its strides.
* m and k are multiples of 128, of which the library stores a compressed matrix without padding; n is padded to a
  multiple of 16.
* Neither operator checks that the device can run it, and some algorithm ids return wrong numbers: see `measure.py`.
* Each thread has one handle of the library, of the GPU that it ran on first (pytorch PR 189048 has one for each GPU): a
  process uses one GPU.
"""

from functools import cache

import torch
from torch import Tensor

MULTIPLE = 128
"""m and k must be multiples of this. The library takes those of 16, too, and pads some; none was measured to win."""

TOKENS_MULTIPLE = 16
"""n is padded to a multiple of this."""

DTYPES = (torch.bfloat16, torch.float16)


@torch.compiler.assume_constant_result  # Dynamo keeps the answer: it could not trace the cache
def unsupported_device(device: torch.device) -> str | None:
    """Why cuSPARSELt cannot run on `device`, or None where it can."""
    reason = _unsupported_device(device)
    if reason is None and _first_gpu and _index(device) != _first_gpu[0]:
        return f"cuSPARSELt runs on one GPU in a process, here on cuda:{_first_gpu[0]}"
    return reason


@cache
def _unsupported_device(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"cuSPARSELt needs a CUDA device, not {device.type}"
    if torch.version.hip is not None:
        return "cuSPARSELt needs an Nvidia GPU"
    if not torch.backends.cusparselt.is_available():
        return "this build of torch has no cuSPARSELt"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"sparse tensor cores need compute capability 8.0 or more: {torch.cuda.get_device_name(device)}"
    return None


def unsupported_matrix(m: int, k: int, dtype: torch.dtype) -> str | None:
    """Why a 2:4 matrix `[m, k]` cannot be compressed, or None where it can."""
    if dtype not in DTYPES:
        return f"the sparse GEMMs run in bf16 and fp16, not {dtype}"
    if m % MULTIPLE or k % MULTIPLE or not m or not k:
        return f"cuSPARSELt needs multiples of {MULTIPLE}, not {m} x {k}"
    return None


def version() -> int | None:
    """The library's version as torch reports it, such as 801 for 0.8.1; None without the library."""
    return torch.backends.cusparselt.version() if torch.backends.cusparselt.is_available() else None


_first_gpu: list[int] = []


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def compressed_columns(k: int) -> int:
    """Columns of a compressed `[m, k]`: k/2 values, and k/8 bytes of indices as 16-bit words."""
    return k * 9 // 16


@torch.library.custom_op("sparse24::cslt_compress", mutates_args=())
def compress(matrix: Tensor) -> Tensor:
    """A 2:4 matrix `[m, k]` in the library's own layout `[m, compressed_columns(k)]`.

    Rows are not rows of the matrix. The layout belongs to this device and library version: never save it.
    """
    if matrix.is_cuda and not _first_gpu:
        _first_gpu.append(matrix.device.index)
    compressed = torch._cslt_compress(matrix.contiguous()).view(len(matrix), -1)
    (m, k), found = matrix.shape, compressed.shape[1]
    if found != compressed_columns(k):
        raise RuntimeError(f"cuSPARSELt stores {m} x {k} of {matrix.dtype} in {found} columns, which is unknown")
    return compressed


compress.register_fake(lambda matrix: matrix.new_empty(len(matrix), compressed_columns(matrix.shape[1])))


@torch.library.custom_op("sparse24::cslt_mm", mutates_args=())
def matmul(compressed: Tensor, dense: Tensor, bias: Tensor | None, transposed: bool, algorithm: int = 0) -> Tensor:
    """`sparse @ dense (+ bias)`, as `[m, n]` or, transposed, as `[n, m]`; row-major either way.

    `dense` is `[k, n]`, and with `transposed` the transpose of a row-major `[n, k]` (other strides are copied); `bias`
    is `[m]`.
    """
    (m, columns), (k, n) = compressed.shape, dense.shape
    if columns != compressed_columns(k):
        raise ValueError(f"cslt_mm: compressed {m} x {columns} is no matrix of {m} x {k}")
    if not compressed.dtype == dense.dtype == (dense.dtype if bias is None else bias.dtype):
        # The library would reinterpret the bits of one dtype as the other.
        raise RuntimeError(f"cslt_mm: operands of one dtype, not {compressed.dtype}, {dense.dtype} and bias {bias}")
    if not n:
        return dense.new_empty((0, m) if transposed else (m, 0))
    # As the algorithm was checked, whatever the strides: activations as the transpose of `[n, k]`.
    dense = _aligned(dense.t().contiguous().t() if transposed else dense.contiguous())
    bias = None if bias is None else _aligned(bias.contiguous())
    missing = -n % TOKENS_MULTIPLE
    if missing:
        pad = torch.nn.functional.pad
        dense = pad(dense.t(), (0, 0, 0, missing)).t() if transposed else pad(dense, (0, missing))
    result = torch._cslt_sparse_mm(compressed, dense, bias=bias, transpose_result=transposed, alg_id=algorithm)
    if missing:
        result = result[:n] if transposed else result[:, :n].contiguous()
    return result


@matmul.register_fake
def _(compressed: Tensor, dense: Tensor, bias: Tensor | None, transposed: bool, algorithm: int = 0) -> Tensor:
    m, n = compressed.shape[0], dense.shape[1]
    return dense.new_empty((n, m) if transposed else (m, n))


def search(compressed: Tensor, dense: Tensor, transposed: bool) -> int:
    """The algorithm that the library's own search prefers for operands as `matmul` hands them on. Where it would split
    k too, `matmul` does not: a split sums in another order from run to run."""
    library = torch._C._cusparselt  # only in builds with the library
    found = library.mm_search(compressed, dense, None, None, None, transposed)  # type: ignore[attr-defined]
    return int(found[0])


def _aligned(tensor: Tensor) -> Tensor:
    """At an address that is a multiple of 16, which torch promises the library of every operand."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
