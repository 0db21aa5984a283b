"""The backend of Nvidia's sparse tensor cores: cuSPARSELt's GEMMs by the algorithms that autotuning found."""

import operator
from typing import cast

import torch
from torch import Tensor

from ..formats import Packed
from . import autotune, cusparselt
from .backend import GemmBackend, GemmPlan
from .operand import Operand, unpack
from .problem import Algorithm, GemmProblem


class CusparseltBackend(GemmBackend):
    """GEMMs on sparse tensor cores. cuSPARSELt compresses the operand."""

    name = "cusparselt"

    def unsupported(self, device: torch.device) -> str | None:
        return cusparselt.unsupported_device(device)

    def plan(self, problem: GemmProblem, device: torch.device, requested: bool) -> GemmPlan | str:
        if not problem.has_one_dtype:
            return "the sparse GEMMs take operands of one dtype"
        reason = cusparselt.unsupported_matrix(problem.m, problem.k, problem.dtype)
        if reason:
            return reason
        verdict = autotune.choose(problem, device)
        if not requested and verdict.backend == "dense":
            return verdict.reason
        algorithm, wrong = verdict.algorithm, None
        if not verdict.measured:
            algorithm, wrong = Algorithm(), autotune.wrong_default(device, problem.dtype, problem.transposed)
        if algorithm is None or wrong:
            return f"requested; {wrong or verdict.reason}"
        _columns(problem.m, problem.k, problem.dtype, device)  # asks the library now, not during CUDA graph capture
        return GemmPlan(self, verdict.reason, algorithm)

    def encode(self, matrix: Tensor | Packed) -> Operand:
        matrix = cast(Tensor, unpack(*matrix) if isinstance(matrix, Packed) else matrix)
        m, k = matrix.shape
        cusparselt.check_compressible("compress", m, k, matrix.dtype, matrix.device)
        return Operand(cusparselt.compress(matrix, _columns(m, k, matrix.dtype, matrix.device)))

    def linear(self, x: Tensor, weight: Operand, bias: Tensor | None, plan: GemmPlan) -> Tensor:
        rows, compressed = x.reshape(-1, x.shape[-1]), weight.values
        cusparselt.check_compressible("sparse_linear", len(compressed), rows.shape[1], x.dtype, x.device)
        result = cusparselt.matmul(compressed, rows.t(), bias, True, *(plan.algorithm or Algorithm()))
        return result.view(*x.shape[:-1], len(compressed))

    def mm(self, sparse: Operand, dense: Tensor, plan: GemmPlan) -> Tensor:
        cusparselt.check_compressible("sparse_mm", len(sparse.values), len(dense), dense.dtype, dense.device)
        return cusparselt.matmul(sparse.values, dense, None, False, *(plan.algorithm or Algorithm()))


def _columns(m: int, k: int, dtype: torch.dtype, device: torch.device) -> int:
    # `index` specialises symbolic sizes: a compressed matrix has one size.
    return cusparselt.library_columns(operator.index(m), operator.index(k), dtype, device)


CUSPARSELT = CusparseltBackend()
