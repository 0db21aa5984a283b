"""GEMMs with one 2:4 operand, run as `plan_gemm` says: dense math on its zeros, or sparse tensor cores."""

from torch import Tensor

from .checks import check_device, check_floating, check_is, check_matrix
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
    check_is(Tensor, "compress", matrix=matrix)
    check_matrix("compress", matrix=matrix)
    m, k = matrix.shape
    cusparselt.check_compressible("compress", m, k, matrix.dtype, matrix.device)
    compression = Compression(unpadded_columns(k), -1) if compression is None else compression
    check_is(Compression, "compress", compression=compression)
    return cusparselt.compress(matrix, compression.columns)


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

    Raises:
        ValueError: shapes, dtypes or devices of the operands that do not fit each other, or, with an algorithm, that
            sparse GEMMs do not take.
    """
    check_floating("sparse_linear", x=x, weight=weight)
    check_matrix("sparse_linear", weight=weight)
    if not x.dim():
        raise ValueError("sparse_linear: x must have a last dimension, got shape ()")
    _check_operands("sparse_linear", weight, x, x.shape[-1], algorithm)
    if bias is not None:
        check_floating("sparse_linear", bias=bias)
        check_device("sparse_linear", x, bias)
        if bias.shape != weight.shape[:1] or bias.dtype != x.dtype:
            raise ValueError(
                f"sparse_linear: bias must be {x.dtype} {tuple(weight.shape[:1])}, got {bias.dtype} {tuple(bias.shape)}"
            )
    return backend_of(algorithm).run(weight, x, bias=bias, transposed=True, scales=None, algorithm=algorithm)


def sparse_mm(sparse: Tensor, dense: Tensor, *, algorithm: Algorithm | None = None) -> Tensor:
    """`sparse @ dense` with a 2:4 left operand.

    Args:
        sparse: without an algorithm, `[m, k]`, 2:4 along k; with one, what `compress` made of it.
        dense: `[k, n]`, any strides.
        algorithm: of the plan of `mm_problem`.

    Returns:
        `[m, n]` in the operands' dtype, row-major.

    Raises:
        ValueError: as for `sparse_linear`.
    """
    check_floating("sparse_mm", sparse=sparse, dense=dense)
    check_matrix("sparse_mm", sparse=sparse, dense=dense)
    _check_operands("sparse_mm", sparse, dense, dense.shape[0], algorithm)
    return backend_of(algorithm).run(sparse, dense, bias=None, transposed=False, scales=None, algorithm=algorithm)


def _check_operands(name: str, sparse: Tensor, dense: Tensor, k: int, algorithm: Algorithm | None) -> None:
    """Raise ValueError where a 2:4 operand `[m, k]`, or what it was compressed to, does not fit the dense operand."""
    if sparse.dtype != dense.dtype:
        raise ValueError(f"{name} needs operands of one dtype, got {sparse.dtype} (2:4) and {dense.dtype} (dense)")
    check_device(name, sparse, dense)
    if algorithm is not None:
        check_is(Algorithm, name, algorithm=algorithm)
        cusparselt.check_compressible(name, sparse.shape[0], k, sparse.dtype, sparse.device)
    elif sparse.shape[1] != k:
        raise ValueError(
            f"{name}: a 2:4 operand of shape {tuple(sparse.shape)} does not contract with a dense one of shape "
            f"{tuple(dense.shape)}: {sparse.shape[1]} and {k}"
        )
