"""GEMMs with one 2:4 operand, run as `plan_gemm` says: dense math on its zeros, or sparse tensor cores."""

from torch import Tensor

from .formats import Compression, unpadded_columns
from .gemm import cusparselt
from .gemm.planning import backend_of
from .gemm.problem import Algorithm


def compress(matrix: Tensor, compression: Compression | None = None) -> Tensor:
    """A 2:4 matrix `[m, k]` as sparse tensor cores read it: `[m, 9 k / 16]`, or more where the library pads it.

    Not checked: the matrix must be 2:4 along k and free of -0.0. The layout belongs to the device and the library's
    version: never save it (`pack_nm` is for that).

    Args:
        matrix: bf16 or fp16, both sizes multiples of 16.
        compression: of the plan of its GEMM; None for a size that the library does not pad.

    Raises:
        ValueError: a dtype, size or device that sparse GEMMs do not take.
        RuntimeError: the library stores this size in another number of columns.
    """
    m, k = matrix.shape
    cusparselt.check_compressible("compress", m, k, matrix.dtype, matrix.device)
    return cusparselt.compress(matrix, unpadded_columns(k) if compression is None else compression.columns)


def sparse_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, algorithm: Algorithm | None = None
) -> Tensor:
    """`F.linear(x, weight, bias)` with a 2:4 weight.

    Args:
        x: `[..., in]`.
        weight: without an algorithm, `[out, in]`, any strides; with one, what `compress` made of it.
        bias: `[out]` or None.
        algorithm: of the plan of `linear_problem`.

    Returns:
        `[..., out]` in the operands' dtype, row-major.
    """
    return backend_of(algorithm).run(weight, x, bias=bias, transposed=True, scales=None, algorithm=algorithm)


def sparse_mm(sparse: Tensor, dense: Tensor, *, algorithm: Algorithm | None = None) -> Tensor:
    """`sparse @ dense` with a 2:4 left operand.

    Args:
        sparse: without an algorithm, `[m, k]`, 2:4 along k; with one, what `compress` made of it.
        dense: `[k, n]`, any strides.
        algorithm: of the plan of `mm_problem`.

    Returns:
        `[m, n]` in the operands' dtype, row-major.
    """
    return backend_of(algorithm).run(sparse, dense, bias=None, transposed=False, scales=None, algorithm=algorithm)
