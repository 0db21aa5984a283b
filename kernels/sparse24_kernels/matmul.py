"""GEMMs with one 2:4 operand, run as its plan says: dense math on its zeros, sparse tensor cores, or packed."""

from torch import Tensor

from .checks import check_device, check_floating, check_is, check_matrix, check_packed
from .formats import Compression, Packed, unpadded_columns
from .gemm import cusparselt
from .gemm import packed as packed_gemm
from .gemm.planning import GemmPlan, backend_of, plan_packed
from .gemm.problem import Algorithm, linear_problem


def compress(matrix: Tensor, compression: Compression | None = None) -> Tensor:
    """A 2:4 matrix `[m, k]` as sparse tensor cores read it: `[m, 9 k / 16]`, or more where the library pads it.

    Not checked: the matrix must be 2:4 along k and free of -0.0. The layout belongs to the device and the library's
    version: never save it (`pack_nm` is for that).

    Args:
        matrix: bf16 or fp16, both sizes multiples of 16, on a GPU that runs sparse GEMMs.
        compression: `plan.compression` of its GEMM; None for a size that the library does not pad.

    Returns:
        `[m, compression.columns]` in the dtype of `matrix`, values and indices together, for `sparse_linear` and
        `sparse_mm` alone to read.

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
        x: `[..., in]`, fp64, fp32, bf16 or fp16; bf16 or fp16 with an algorithm.
        weight: in the dtype of `x`. Without an algorithm, `[out, in]`, any strides; with one, what `compress` made of
            it.
        bias: `[out]` in the dtype of `x`, or None.
        algorithm: `plan.algorithm` of `plan_gemm(linear_problem(...), ...)`; None is dense math.

    Returns:
        `[..., out]` in the operands' dtype, row-major.

    Raises:
        ValueError: shapes, dtypes or devices of the operands that do not fit each other, or, with an algorithm, that
            sparse GEMMs do not take.

    Examples:
        >>> weight = nm_prune(torch.randn(16, 32))
        >>> x = torch.randn(8, 32)
        >>> plan = plan_gemm(linear_problem(tokens=8, out=16, inputs=32, dtype=x.dtype), x.device)
        >>> operand = compress(weight, plan.compression) if plan.is_sparse else weight
        >>> sparse_linear(x, operand, algorithm=plan.algorithm).shape
        torch.Size([8, 16])
    """
    check_floating("sparse_linear", x=x, weight=weight)
    check_matrix("sparse_linear", weight=weight)
    _check_activations("sparse_linear", x)
    _check_operands("sparse_linear", weight, x, x.shape[-1], algorithm)
    _check_bias("sparse_linear", bias, x, len(weight))
    return backend_of(algorithm).run(weight, x, bias=bias, transposed=True, scales=None, algorithm=algorithm)


def packed_linear(x: Tensor, packed: Packed, bias: Tensor | None = None, *, plan: GemmPlan | None = None) -> Tensor:
    """`F.linear(x, unpack_nm(packed), bias)`, on a GPU and for few tokens without the dense weight in memory.

    Not differentiable where a kernel runs: the gradient of x is `grad @ unpack_nm(packed)`.

    Args:
        x: `[..., in]`, fp64, fp32, bf16 or fp16.
        packed: what `pack_nm` made of a weight `[out, in]` in the dtype of `x`.
        bias: `[out]` in that dtype, or None.
        plan: of `plan_packed`; None makes it here.

    Returns:
        `[..., out]` in the operands' dtype, row-major, summed in fp32 (of fp64 operands in fp64). By dense math it has
        the bits of `F.linear`; the kernel rounds once, and gives the same bits in every call.

    Raises:
        ValueError: shapes, dtypes or devices of the operands that do not fit each other.

    Examples:
        >>> packed = pack_nm(nm_prune(torch.randn(16, 32)))
        >>> packed_linear(torch.randn(8, 32), packed).shape
        torch.Size([8, 16])
    """
    check_floating("packed_linear", x=x)
    check_packed("packed_linear", packed)
    values, indices = packed
    check_matrix("packed_linear", values=values)
    out, inputs = len(values), 2 * values.shape[1]
    _check_activations("packed_linear", x)
    check_device("packed_linear", x, values)
    if (x.shape[-1], x.dtype) != (inputs, values.dtype):
        raise ValueError(
            f"packed_linear: a packed weight of {values.dtype} {out} x {inputs} does not contract with x of {x.dtype} "
            f"{tuple(x.shape)}"
        )
    _check_bias("packed_linear", bias, x, out)
    if plan is None:
        plan = plan_packed(linear_problem(x.shape[:-1].numel(), out, inputs, x.dtype), x.device)
    check_is(GemmPlan, "packed_linear", plan=plan)
    if plan.backend == "packed":
        return packed_gemm.PACKED.run(packed, x, bias=bias, transposed=True, scales=None, algorithm=None)
    if plan.compression is None:
        weight = packed_gemm.unpack(values, indices)
    else:
        weight = packed_gemm.compress(values, indices, *plan.compression)
    return sparse_linear(x, weight, bias, algorithm=plan.algorithm)


def sparse_mm(sparse: Tensor, dense: Tensor, *, algorithm: Algorithm | None = None) -> Tensor:
    """`sparse @ dense` with a 2:4 left operand.

    Args:
        sparse: without an algorithm, `[m, k]`, 2:4 along k; with one, what `compress` made of it. fp64, fp32, bf16 or
            fp16; bf16 or fp16 with an algorithm.
        dense: `[k, n]` in the same dtype, any strides.
        algorithm: `plan.algorithm` of `plan_gemm(mm_problem(...), ...)`; None is dense math.

    Returns:
        `[m, n]` in the operands' dtype, row-major.

    Raises:
        ValueError: shapes, dtypes or devices of the operands that do not fit each other, or, with an algorithm, that
            sparse GEMMs do not take.
    """
    check_floating("sparse_mm", sparse=sparse, dense=dense)
    check_matrix("sparse_mm", sparse=sparse, dense=dense)
    _check_operands("sparse_mm", sparse, dense, dense.shape[0], algorithm)
    return backend_of(algorithm).run(sparse, dense, bias=None, transposed=False, scales=None, algorithm=algorithm)


def _check_activations(name: str, x: Tensor) -> None:
    if not x.dim():
        raise ValueError(f"{name}: x must have a last dimension, got shape ()")


def _check_bias(name: str, bias: Tensor | None, x: Tensor, out: int) -> None:
    if bias is not None:
        check_floating(name, bias=bias)
        check_device(name, x, bias)
        if tuple(bias.shape) != (out,) or bias.dtype != x.dtype:
            raise ValueError(f"{name}: bias must be {x.dtype} {(out,)}, got {bias.dtype} {tuple(bias.shape)}")


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
