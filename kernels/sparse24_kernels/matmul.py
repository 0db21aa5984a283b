"""The products with one 2:4 operand: dense math on its zeros, or sparse tensor cores where those are faster."""

import operator

import torch
from torch import Tensor

from . import cusparselt
from .backends import check_backend, choose_product
from .checks import check_compressible
from .cusparselt import Algorithm, Problem
from .layout import learn_layout


def linear_problem(tokens: int, out: int, inputs: int, dtype: torch.dtype) -> Problem:
    """`F.linear` of `[tokens, inputs]` activations with a 2:4 weight `[out, inputs]`."""
    return Problem(out, tokens, inputs, dtype, dense_is_column_major=True, transposed=True)


def mm_problem(m: int, n: int, k: int, dtype: torch.dtype) -> Problem:
    """A sparse `[m, k]` times a dense `[k, n]`, both row-major, such as dZ^T X."""
    return Problem(m, n, k, dtype, dense_is_column_major=False, transposed=False)


def plan_linear(
    tokens: int, out: int, inputs: int, dtype: torch.dtype, device: torch.device, backend: str = "auto"
) -> Algorithm | None:
    """How `sparse_linear` should run: an algorithm, or None for dense math.

    Made apart from the product, because it decides which form of the weight is needed. A graph of torch.compile holds
    for the tokens of one bucket (see `tuner`), where sparse products are possible at all.

    Args:
        tokens: rows of the activations, all leading dimensions together. out, inputs: the weight's sizes.
        dtype: of the product. backend: `"auto"`, or one of `BACKENDS`.

    Raises:
        ValueError: an unknown backend, or one that was asked for by name and cannot run on `device`.
    """
    return _plan(backend, linear_problem(tokens, out, inputs, dtype), device)


def plan_mm(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, backend: str = "auto"
) -> Algorithm | None:
    """`plan_linear` for `sparse_mm`: a sparse `[m, k]` times a dense `[k, n]`, both row-major."""
    return _plan(backend, mm_problem(m, n, k, dtype), device)


def _plan(backend: str, problem: Problem, device: torch.device) -> Algorithm | None:
    algorithm = choose_product(backend, problem, device).algorithm
    if algorithm is not None:
        learn_layout(operator.index(problem.m), operator.index(problem.k), problem.dtype, device)
    return algorithm


def why_not_sparse(m: int, k: int, dtype: torch.dtype, device: torch.device, backend: str = "auto") -> str | None:
    """Why a 2:4 matrix `[m, k]` cannot be multiplied on sparse tensor cores, whatever the speed; None where it can."""
    check_backend(backend)
    if backend == "reference":
        return "backend='reference'"
    return cusparselt.why_not(device) or cusparselt.why_not_matrix(m, k, dtype)


def compress(matrix: Tensor) -> Tensor:
    """A 2:4 matrix `[m, k]` as sparse tensor cores read it: `[m, 9 k / 16]`, or more where the library pads it.

    Trusted to be 2:4 along k and free of -0.0, not checked. The layout belongs to the device and the library's version:
    never save it (`pack_nm` is for that).

    Raises:
        ValueError: a dtype, size or device that sparse products do not take.
    """
    check_compressible("compress", matrix, matrix.dtype)
    return cusparselt.compress(matrix)


def sparse_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, algorithm: Algorithm | None = None
) -> Tensor:
    """`F.linear(x, weight, bias)` with a 2:4 weight.

    Args:
        x: `[..., in]`. bias: `[out]` or None.
        weight: without an algorithm, `[out, in]`, any strides; with one, what `compress` made of it.
        algorithm: of `plan_linear`.

    Returns:
        `[..., out]` in the operands' dtype, row-major.
    """
    if algorithm is None:
        # F.linear, so that a model gives the same bits before and after its layers are unpatched.
        return torch.nn.functional.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    result = cusparselt.matmul(weight, flat.t(), bias, True, *algorithm)
    return result.view(*x.shape[:-1], len(weight))


def sparse_mm(sparse: Tensor, dense: Tensor, *, algorithm: Algorithm | None = None) -> Tensor:
    """`sparse @ dense` with a 2:4 left operand.

    Args:
        sparse: without an algorithm, `[m, k]`, 2:4 along k; with one, what `compress` made of it.
        dense: `[k, n]`, any strides. algorithm: of `plan_mm`.

    Returns:
        `[m, n]` in the operands' dtype, row-major.
    """
    if algorithm is None:
        return sparse @ dense
    return cusparselt.matmul(sparse, dense, None, False, *algorithm)
