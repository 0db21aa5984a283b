"""The backend of Nvidia's sparse tensor cores: cuSPARSELt's GEMMs by the algorithms that autotuning found."""

import operator
from typing import cast

import torch
from torch import Tensor

from .. import reference
from ..formats import Compression, Packed
from . import autotune, cusparselt
from .backend import GemmBackend, GemmPlan
from .layout import find_compression, layout_of
from .operand import Operand, unpack
from .problem import Algorithm, GemmProblem


@torch.library.custom_op("sparse24::compress_packed", mutates_args=())
def compress_packed(values: Tensor, indices: Tensor, columns: int, layout: int) -> Tensor:
    """What `cusparselt.compress` makes of the dense matrix; where the layout is known, only the indices move."""
    m, k = len(values), 2 * values.shape[1]
    found = layout_of(Compression(columns, layout), m, k, values.dtype, values.device)
    if found is None:
        return cusparselt.compress(unpack(values, indices), columns)
    return reference.prune.compress(values, indices, found)


@compress_packed.register_fake
def _(values: Tensor, indices: Tensor, columns: int, layout: int) -> Tensor:
    return values.new_empty(len(values), columns)


class CusparseltBackend(GemmBackend):
    """GEMMs on sparse tensor cores. The operand is compressed (`layout.py`)."""

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
        algorithm = verdict.algorithm if verdict.measured else Algorithm()
        if algorithm is None or (not requested and verdict.backend == "dense"):
            return f"requested; {verdict.reason}" if requested else verdict.reason
        # `index` specialises symbolic sizes: a compressed matrix has one size.
        m, k = operator.index(problem.m), operator.index(problem.k)
        return GemmPlan(self, verdict.reason, algorithm, find_compression(m, k, problem.dtype, device))

    def encode(self, matrix: Tensor | Packed, compression: Compression) -> Operand:
        if isinstance(matrix, Packed) and matrix.scales is None:
            return Operand(compress_packed(matrix.values, matrix.indices, compression.columns, compression.layout))
        matrix = cast(Tensor, unpack(*matrix) if isinstance(matrix, Packed) else matrix)
        m, k = matrix.shape
        cusparselt.check_compressible("compress", m, k, matrix.dtype, matrix.device)
        return Operand(cusparselt.compress(matrix, compression.columns))

    def linear(self, x: Tensor, weight: Operand, bias: Tensor | None, plan: GemmPlan) -> Tensor:
        rows, compressed = x.reshape(-1, x.shape[-1]), weight.values
        cusparselt.check_compressible("sparse_linear", len(compressed), rows.shape[1], x.dtype, x.device)
        result = cusparselt.matmul(compressed, rows.t(), bias, True, *(plan.algorithm or Algorithm()))
        return result.view(*x.shape[:-1], len(compressed))

    def mm(self, sparse: Operand, dense: Tensor, plan: GemmPlan) -> Tensor:
        cusparselt.check_compressible("sparse_mm", len(sparse.values), len(dense), dense.dtype, dense.device)
        return cusparselt.matmul(sparse.values, dense, None, False, *(plan.algorithm or Algorithm()))


CUSPARSELT = CusparseltBackend()
