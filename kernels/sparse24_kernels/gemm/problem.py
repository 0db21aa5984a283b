"""One GEMM `sparse @ dense` as data: shape, dtypes, memory layouts; buckets of n."""

from typing import NamedTuple

import torch

from ..checks import check_is, check_size
from ..formats import Pattern


class GemmProblem(NamedTuple):
    """A 2:4 operand `[m, k]`, sparse along k, times a dense operand `[k, n]`.

    `linear_problem` and `mm_problem` make the two kinds that training has.

    Attributes:
        m: rows of the sparse operand.
        n: columns of the dense operand; the tokens of a linear layer.
        k: what is contracted.
        dtype: of the result.
        transposed: the dense operand is the transpose of a contiguous `[n, k]`, as activations are, and the result a
            contiguous `[n, m]`. Otherwise both are row-major.
        is_int8: whether a packed weight has int8 values, with scales in `dtype`.
        pattern: of the sparse operand. Packed weights may have others than 2:4.
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype
    transposed: bool
    is_int8: bool = False
    pattern: Pattern = Pattern(2, 4)


BUCKETS = tuple(edge for power in range(4, 32) for edge in (2**power, 3 * 2 ** (power - 1)) if edge % 16 == 0)


def bucket(n: int) -> int:
    """The largest n that shares a measurement with `n`: a power of two or the middle of two (16, 32, 48, 64, 96, ...).

    Rounded up, because full batches are usually powers of two and the last batch is smaller. Only comparisons, so
    torch.compile turns a dynamic n into a guard on this range.
    """
    for edge in BUCKETS:
        if n <= edge:
            return edge
    return BUCKETS[-1]


def bucket_start(n: int) -> int:
    """The smallest n that shares a measurement with `n`."""
    index = BUCKETS.index(bucket(n))
    return BUCKETS[index - 1] + 1 if index else 1


def linear_problem(tokens: int, out: int, inputs: int, dtype: torch.dtype) -> GemmProblem:
    """The GEMM of `F.linear` on `[tokens, inputs]` activations with a 2:4 weight `[out, inputs]`.

    Args:
        tokens: rows of the activations, all dimensions but the last one together.
        out: output size of the layer.
        inputs: its input size, which is contracted.
        dtype: of the operands.

    Returns:
        The problem, for `plan_gemm` and `plan_packed`.

    Raises:
        ValueError: a size that is no int or negative, or a `dtype` that is none.
    """
    check_size("linear_problem", tokens=tokens, out=out, inputs=inputs)
    check_is(torch.dtype, "linear_problem", dtype=dtype)
    return GemmProblem(out, tokens, inputs, dtype, transposed=True)


def mm_problem(m: int, n: int, k: int, dtype: torch.dtype) -> GemmProblem:
    """The GEMM of a sparse `[m, k]` and a dense `[k, n]`, both row-major, such as dZ^T X, which is grad_weight.

    Args:
        m: rows of the sparse operand.
        n: columns of the dense operand.
        k: what is contracted.
        dtype: of the operands.

    Returns:
        The problem, for `plan_gemm`.

    Raises:
        ValueError: a size that is no int or negative, or a `dtype` that is none.
    """
    check_size("mm_problem", m=m, n=n, k=k)
    check_is(torch.dtype, "mm_problem", dtype=dtype)
    return GemmProblem(m, n, k, dtype, transposed=False)
