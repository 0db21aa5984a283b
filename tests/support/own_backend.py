"""A GEMM backend with one operator, as a user writes it: one file, one registration, no other import of ours."""

import torch
from sparse24_kernels.gemm import GemmBackend, GemmPlan, register_backend
from torch.nn.functional import linear


class Fp32Backend(GemmBackend):
    """Linear layers summed and rounded in fp32, on the pruned matrix as it is."""

    name = "fp32"

    def plan(self, problem, device, requested):
        if not problem.transposed:
            return "fp32 has linear layers only"
        if problem.dtype not in (torch.bfloat16, torch.float16):
            return f"fp32 gains nothing for {problem.dtype}"
        return GemmPlan(self, "sums in fp32")

    def linear(self, x, weight, bias, plan):
        result = linear(x.float(), weight.values.float(), None if bias is None else bias.float())
        return result.to(x.dtype)


register_backend(Fp32Backend())
