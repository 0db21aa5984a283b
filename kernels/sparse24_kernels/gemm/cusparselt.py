"""cuSPARSELt, which runs on Nvidia's sparse tensor cores: called directly (`direct.py`), or by torch's two operators.

Both leave some work to the caller, which is done here:

* A dense operand that is not contiguous is *taken* for the transpose of one that is, whatever its strides.
* m and k are multiples of 128, of which the library stores a compressed matrix without padding; n is padded to a
  multiple of 16.
* Neither checks that the device can run it, and some algorithm ids return wrong numbers: see `measure.py`.
* torch's operators have one handle of the library for a thread, of the GPU that it ran on first (pytorch PR 189048 has
  one for each GPU): a process that calls them uses one GPU.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product

import torch
from torch import Tensor

from .. import first_use
from ..operators import register
from . import direct
from .first_check import first_difference

MULTIPLE = 128
"""m and k must be multiples of this. The library takes those of 16, too, and pads some; none was measured to win."""

DTYPES = (torch.bfloat16, torch.float16)


@torch.compiler.assume_constant_result  # Dynamo keeps the answer: it could not trace the cache
def unsupported_device(device: torch.device) -> str | None:
    """Why cuSPARSELt cannot run on `device`, or None where it can."""
    reason = _unsupported_device(device)
    if reason is None and _first_gpu and _indexed(device) != _first_gpu[0] and not_direct(device):
        return f"cuSPARSELt runs on one GPU in a process, here on {_first_gpu[0]}"
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


_first_gpu: list[torch.device] = []


def _indexed(device: torch.device) -> torch.device:
    is_current = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_current else device


def not_direct(device: torch.device) -> str:
    """Why torch's operators call the library for `device`; "" where `direct.py` does."""
    return _not_direct(_indexed(device))


@cache
def _not_direct(device: torch.device) -> str:
    library = direct.load()
    reason = library if isinstance(library, str) else "" if device.type == "cuda" else "the library needs a GPU"
    for dtype, gemm in product(DTYPES, ("linear 0", "mm 0")):
        reason = reason or first_use.verdict(subject(device, dtype), f"direct {gemm}")
    return reason


def subject(device: torch.device, dtype: torch.dtype, operators: Sequence[str] = ()) -> first_use.Subject:
    """The library's GEMMs, to be compared with exact results."""
    check = partial(_first_difference, device, dtype)
    return first_use.Subject("cusparselt", operators, device, dtype, check, str(version()))


def _first_difference(device: torch.device, dtype: torch.dtype, operator: str) -> str:
    if operator.startswith("torch"):
        _take_handle_of_torch(device)
    return first_difference(device, dtype, operator)


def checked(device: torch.device) -> list[str]:
    """All that is compared on first use, as `first_difference` takes it: by the way that runs, and by direct calls."""
    ways = dict.fromkeys((*(() if isinstance(direct.load(), str) else ("direct",)), way(device)))
    return [f"{each} {gemm}" for each in ways for transposed in (True, False) for gemm in _starts(device, transposed)]


def way(device: torch.device) -> str:
    """How the library is called for `device`: "direct" or "torch"."""
    return "torch" if not_direct(device) else "direct"


@torch.compiler.assume_constant_result
def untuned_algorithm(device: torch.device, dtype: torch.dtype, transposed: bool) -> int | str:
    """The algorithm to run where nothing was measured, which is right on first use, or why there is none."""
    for gemm in _starts(device, transposed):
        reason = first_use.verdict(subject(device, dtype), f"{way(device)} {gemm}")
        if not reason:
            return int(gemm.split()[1])
    return f"cuSPARSELt failed its check on first use: {reason}"


def _starts(device: torch.device, transposed: bool) -> tuple[str, ...]:
    """GEMM and algorithm: the default, and on Hopper before it what was fastest of almost all sizes on an H100."""
    default, fastest = ("linear 0", "linear 17") if transposed else ("mm 0", "mm 3")
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return (fastest, default) if is_hopper else (default,)


def _run(device: torch.device, call: Callable[[direct.Library], Tensor], by_torch: Callable[[], Tensor]) -> Tensor:
    """What the library computes, called directly or by torch's operator."""
    library = direct.load()
    if not isinstance(library, str) and not not_direct(device):
        with torch.cuda.device(device if device.type == "cuda" else -1):
            return call(library)
    _take_handle_of_torch(device)
    return by_torch()


def _take_handle_of_torch(device: torch.device) -> None:
    if device.type == "cuda" and not _first_gpu:
        _first_gpu.append(device)
    if device.type == "cuda" and device != _first_gpu[0]:
        raise RuntimeError(f"cuSPARSELt runs on one GPU in a process, here on {_first_gpu[0]}")


def compressed_columns(k: int) -> int:
    """Columns of a compressed `[m, k]`: k/2 values, and k/8 bytes of indices as 16-bit words."""
    return k * 9 // 16


@register("sparse24::cslt_compress", lambda matrix: matrix.new_empty(len(matrix), compressed_columns(matrix.shape[1])))
def compress(matrix: Tensor) -> Tensor:
    """A 2:4 matrix `[m, k]` in the library's own layout `[m, compressed_columns(k)]`.

    Rows are not rows of the matrix. The layout belongs to this device and library version: never save it.
    """
    matrix = matrix.contiguous()
    compressed = _run(
        matrix.device,
        lambda library: direct.compress(library, matrix),
        lambda: torch._cslt_compress(matrix).view(len(matrix), -1),
    )
    (m, k), found = matrix.shape, compressed.shape[1]
    if found != compressed_columns(k):
        raise RuntimeError(f"cuSPARSELt stores {m} x {k} of {matrix.dtype} in {found} columns, which is unknown")
    return compressed


def _fake_matmul(compressed: Tensor, dense: Tensor, bias: Tensor | None, transposed: bool, *_: int) -> Tensor:
    m, n = compressed.shape[0], dense.shape[1]
    return dense.new_empty((n, m) if transposed else (m, n))


@register("sparse24::cslt_mm", _fake_matmul)
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
    missing = -n % 16  # the library takes multiples of it
    if missing:
        pad = torch.nn.functional.pad
        dense = pad(dense.t(), (0, 0, 0, missing)).t() if transposed else pad(dense, (0, missing))
    # As the algorithm was checked, whatever the strides: activations as the transpose of `[n, k]`.
    if dense.stride() != ((1, k) if transposed else (n + missing, 1)):
        dense = dense.t().contiguous().t() if transposed else dense.contiguous()
    dense, bias = _aligned(dense), None if bias is None else _aligned(bias.contiguous())
    result = _run(
        dense.device,
        lambda library: direct.matmul(library, compressed, dense, bias, transposed, algorithm),
        lambda: torch._cslt_sparse_mm(compressed, dense, bias=bias, transpose_result=transposed, alg_id=algorithm),
    )
    if missing:
        result = result[:n] if transposed else result[:, :n].contiguous()
    return result


def search(compressed: Tensor, dense: Tensor, transposed: bool) -> int:
    """The algorithm that the library's own search prefers for operands as `matmul` hands them on. Where it would split
    k too, `matmul` does not: a split sums in another order from run to run."""
    _take_handle_of_torch(dense.device)
    library = torch._C._cusparselt  # only in builds with the library
    found = library.mm_search(compressed, dense, None, None, None, transposed)  # type: ignore[attr-defined]
    return int(found[0])


def _aligned(tensor: Tensor) -> Tensor:
    """At an address that is a multiple of 16, which torch promises the library of every operand."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
