"""The backend of CPUs: GEMMs in fp32 by the kernels that skip zeros, where they were measured to be faster."""

from operator import index
from typing import cast

import torch
from torch import Tensor

from ..formats import Packed
from . import autotune, cpu_kernels
from .backend import GemmBackend, GemmPlan
from .operand import Operand, unpack
from .problem import GemmProblem


class CpuBackend(GemmBackend):
    """GEMMs in fp32 with half the multiplications."""

    name = "cpu"
    takes_packed = True

    def unsupported(self, device: torch.device) -> str | None:
        if not autotune.uses_cpu_kernels(device):
            return f"kernels that skip zeros need a CPU, not {device.type}"
        return cpu_kernels.unsupported_device(device)

    def plan(self, problem: GemmProblem, device: torch.device, requested: bool) -> GemmPlan | str:
        if not problem.has_one_dtype:
            return "the sparse GEMMs take operands of one dtype"
        reason = cpu_kernels.unsupported_matrix(index(problem.k), problem.dtype)
        if reason:
            return reason
        verdict = autotune.choose(problem, device)
        if not requested and verdict.backend == "dense":
            return verdict.reason
        return GemmPlan(self, verdict.reason)

    def encode(self, matrix: Tensor | Packed) -> Operand:
        return Operand(cpu_kernels.compress(cast(Tensor, unpack(*matrix) if isinstance(matrix, Packed) else matrix)))

    def linear(self, x: Tensor, weight: Operand, bias: Tensor | None, plan: GemmPlan) -> Tensor:
        return cpu_kernels.linear(x, weight.values, bias)

    def mm(self, sparse: Operand, dense: Tensor, plan: GemmPlan) -> Tensor:
        return cpu_kernels.mm(sparse.values, dense)


CPU = CpuBackend()
