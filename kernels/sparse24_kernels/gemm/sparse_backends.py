"""The backends of what autotuning found to be faster: cuSPARSELt on sparse tensor cores, our kernels on CPUs."""

from functools import cache

import torch
from torch import Tensor

from .. import reference
from ..dispatch import choose_kernels
from ..formats import Packed
from ..operators import Pruning, not_differentiable
from ..prune import prune_forms
from . import autotune, cpu_kernels, cusparselt
from .backend import GemmBackend, GemmPlan, Operand
from .problem import GemmProblem


def _verdict(problem: GemmProblem, device: torch.device, requested: bool) -> autotune.Verdict | str:
    """The verdict of autotuning on a GEMM, or the reason why it is left to dense math."""
    if torch.compiler.is_compiling() and not (requested or autotune.is_measured(problem, device)):
        verdict = autotune.untuned(problem, device)  # one graph holds for all lengths that share it
    elif reason := autotune.unsupported_matrix(problem, device):
        return reason
    else:
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
        algorithm: int | str | None = verdict.algorithm
        if not verdict.measured:
            algorithm = cusparselt.untuned_algorithm(device, problem.dtype, problem.transposed)
        if not isinstance(algorithm, int):
            return f"requested; {algorithm or verdict.reason}"
        form = "sm90" if kernels_compress(device, problem.dtype) else "dense"
        return GemmPlan(self, verdict.reason, algorithm, form)

    def encode(self, matrix: Tensor | Packed) -> Operand:
        matrix = super().encode(matrix).values
        reason = None if matrix.is_meta else self.unsupported(matrix.device)
        if reason := reason or cusparselt.unsupported_matrix(len(matrix), matrix.shape[1], matrix.dtype):
            raise ValueError(f"compress: no compressed form: {reason}")
        if kernels_compress(matrix.device, matrix.dtype):  # the two largest of a group are what is there
            return Operand(prune_forms(matrix, ["sm90"])[0])
        return Operand(not_differentiable(cusparselt.compress, matrix))

    def linear(self, x: Tensor, weight: Operand, bias: Tensor | None, plan: GemmPlan) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        operands = weight.values, rows.t(), bias
        result = not_differentiable(cusparselt.matmul, *operands, True, plan.algorithm or 0)
        return result.view(*x.shape[:-1], len(weight.values))

    def mm(self, sparse: Operand, dense: Tensor, plan: GemmPlan) -> Tensor:
        return not_differentiable(cusparselt.matmul, sparse.values, dense, None, False, plan.algorithm or 0)


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
    numbers = torch.arange(128 * 384, device=device).sin().view(128, 384)
    (matrix,) = reference.prune.prune(numbers, Pruning("magnitude", dim=1, dtype=dtype))
    ours, theirs = reference.packed.for_sm90(matrix), cusparselt.compress(matrix)
    return torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


CPU = CpuBackend()
CUSPARSELT = CusparseltBackend()
