"""The backends of what autotuning found to be faster: cuSPARSELt on sparse tensor cores, our kernels on CPUs."""

import operator
from functools import cache

import torch
from torch import Tensor

from .. import reference
from ..dispatch import choose_kernels
from ..formats import SM90_MULTIPLE, Packed
from ..operators import Pruning
from ..prune import prune_forms
from . import autotune, cpu_kernels, cusparselt
from .backend import GemmBackend, GemmPlan, Operand
from .problem import GemmProblem


def _verdict(problem: GemmProblem, device: torch.device, requested: bool) -> autotune.Verdict | str:
    """The verdict of autotuning on a GEMM, or the reason why it is left to dense math."""
    if reason := autotune.unsupported_matrix(problem, device):
        return reason
    verdict = autotune.verdict_of(problem, device)
    return verdict if requested or verdict.backend != "dense" else verdict.reason


class CpuBackend(GemmBackend):
    """GEMMs in fp32 with half the multiplications."""

    name = "cpu"

    def unsupported(self, device: torch.device) -> str | None:
        if not autotune.uses_cpu_kernels(device):
            return f"kernels that skip zeros need a CPU, not {device.type}"
        return cpu_kernels.unsupported_device(device)

    def plan(self, problem: GemmProblem, device: torch.device, requested: bool) -> GemmPlan | str:
        verdict = _verdict(problem, device, requested)
        return verdict if isinstance(verdict, str) else GemmPlan(self, verdict.reason, form="packed")

    def encode(self, matrix: Tensor | Packed) -> Operand:
        return Operand(cpu_kernels.compress(super().encode(matrix).values))

    def linear(self, x: Tensor, weight: Operand, bias: Tensor | None, plan: GemmPlan) -> Tensor:
        return cpu_kernels.linear(x, weight.values, bias)

    def mm(self, sparse: Operand, dense: Tensor, plan: GemmPlan) -> Tensor:
        return cpu_kernels.mm(sparse.values, dense)


class CusparseltBackend(GemmBackend):
    """GEMMs on sparse tensor cores by the algorithms that autotuning found. Pruning writes the compressed operand
    where its kernels know the layout, otherwise cuSPARSELt compresses."""

    name = "cusparselt"

    def unsupported(self, device: torch.device) -> str | None:
        return cusparselt.unsupported_device(device)

    def plan(self, problem: GemmProblem, device: torch.device, requested: bool) -> GemmPlan | str:
        verdict = _verdict(problem, device, requested)
        if isinstance(verdict, str):
            return verdict
        algorithm, wrong = verdict.algorithm, None
        if not verdict.measured:
            algorithm, wrong = 0, autotune.wrong_default(device, problem.dtype, problem.transposed)
        if algorithm is None or wrong:
            return f"requested; {wrong or verdict.reason}"
        # This asks the library now, not during CUDA graph capture.
        return GemmPlan(self, verdict.reason, algorithm, _form(problem.m, problem.k, problem.dtype, device))

    def encode(self, matrix: Tensor | Packed) -> Operand:
        matrix = super().encode(matrix).values
        m, k = matrix.shape
        cusparselt.check_compressible("compress", m, k, matrix.dtype, matrix.device)
        if _form(m, k, matrix.dtype, matrix.device) == "sm90":  # the two largest of a group are what is there
            return Operand(prune_forms(matrix, ["sm90"])[0])
        return Operand(cusparselt.compress(matrix, _columns(m, k, matrix.dtype, matrix.device)))

    def linear(self, x: Tensor, weight: Operand, bias: Tensor | None, plan: GemmPlan) -> Tensor:
        rows, compressed = x.reshape(-1, x.shape[-1]), weight.values
        cusparselt.check_compressible("sparse_linear", len(compressed), rows.shape[1], x.dtype, x.device)
        result = cusparselt.matmul(compressed, rows.t(), bias, True, plan.algorithm or 0)
        return result.view(*x.shape[:-1], len(compressed))

    def mm(self, sparse: Operand, dense: Tensor, plan: GemmPlan) -> Tensor:
        cusparselt.check_compressible("sparse_mm", len(sparse.values), len(dense), dense.dtype, dense.device)
        return cusparselt.matmul(sparse.values, dense, None, False, plan.algorithm or 0)


@torch.compiler.assume_constant_result
def kernels_compress(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether pruning writes what cuSPARSELt compresses: kernels run, and the library's layout is the one they know.

    On an H100, cuSPARSELt 0.8.0 takes some 20 times as long as a copy, and every step has new operands.
    """
    return _kernels_compress(device, dtype)


@cache  # every layer asks in every step
def _kernels_compress(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda" or dtype not in cusparselt.DTYPES or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return choose_kernels(device, dtype).implementation == "triton" and stores_as_known(device, dtype)


def stores_as_known(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether cuSPARSELt compresses a small matrix to its sm90 form (`formats.FORMS`)."""
    numbers = torch.arange(192 * 320, device=device).sin().view(192, 320)
    (matrix,) = reference.prune.prune(numbers, Pruning("magnitude", dim=1, dtype=dtype))
    ours, theirs = reference.packed.for_sm90(matrix), cusparselt.compress_by_library(matrix)
    return ours.shape == theirs.shape and torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


def _form(m: int, k: int, dtype: torch.dtype, device: torch.device) -> str:
    """`"sm90"` where our kernels write what the library compresses, else `"dense"`."""
    columns, compresses = _columns(m, k, dtype, device), kernels_compress(device, dtype)
    fits = m % SM90_MULTIPLE == 0 and k % SM90_MULTIPLE == 0 and columns == cusparselt.unpadded_columns(k)
    return "sm90" if fits and compresses else "dense"


def _columns(m: int, k: int, dtype: torch.dtype, device: torch.device) -> int:
    # `index` specialises symbolic sizes: a compressed matrix has one size.
    return cusparselt.library_columns(operator.index(m), operator.index(k), dtype, device)


CPU = CpuBackend()
CUSPARSELT = CusparseltBackend()
