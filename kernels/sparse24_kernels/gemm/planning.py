"""Which backend runs a GEMM, by which algorithm, and the operand as it stores it. Every plan has its reason."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from ..checks import check_floating, check_is, check_matrix, check_packed
from ..formats import Packed, Pattern
from .backend import AUTOMATIC, DENSE, GemmPlan, Operand, find_backend, register_backend
from .packed import PACKED
from .problem import GemmProblem
from .sparse_backends import CPU, CUSPARSELT

register_backend(CUSPARSELT, auto=True)
register_backend(CPU, auto=True)


def plan_gemm(problem: GemmProblem, device: torch.device, backend: str = "auto") -> GemmPlan:
    """How to run `problem` on `device`. The plan decides which form of the sparse operand is needed.

    Measurements, and a graph of torch.compile, hold for all n of one bucket: close sizes share one measurement.

    Args:
        problem: of `linear_problem` or `mm_problem`; n may be symbolic while torch.compile traces.
        device: where the operands are.
        backend: a backend's name, or `"auto"`, which asks the backends in order. `"dense"` is dense math.
            `"cusparselt"` runs on Nvidia's sparse tensor cores: under `"auto"` only where a measurement, with checked
            results, says that it is faster and that the GPU need not wait for the host; requested, by the fastest known
            algorithm even where dense is faster, or where nothing was measured by the library's default, on compute
            capability 9.0 by the one that was fastest there. `"cpu"` runs
            in fp32 on CPUs, under `"auto"` where a measurement says that it is faster, or without one, from 512 tokens
            and features on, on AMD's. `register_backend` adds others.

    Returns:
        The plan, with its reason. Dense math runs what the backends refuse, each with its reason.

    Raises:
        ValueError: an unknown backend, or one that does not run on `device`.

    Examples:
        >>> problem = linear_problem(tokens=4096, out=4096, inputs=1024, dtype=torch.bfloat16)
        >>> plan = plan_gemm(problem, torch.device("cpu"))
        >>> plan.backend.name, plan.is_sparse
        ('dense', False)
    """
    check_is(GemmProblem, "plan_gemm", problem=problem)
    check_is(torch.device, "plan_gemm", device=device)
    if backend == DENSE.name:
        return GemmPlan(DENSE, "requested")
    if backend != "auto":
        planned = find_backend(backend, device).plan(problem, device, True)
        if isinstance(planned, str):
            return GemmPlan(DENSE, planned)
        return planned._replace(reason=f"requested; {planned.reason}")
    elsewhere, refusals = [], []
    for candidate in AUTOMATIC.values():
        if reason := candidate.unsupported(device):
            elsewhere.append(reason)
            continue
        planned = candidate.plan(problem, device, False)
        if isinstance(planned, GemmPlan):
            return planned
        refusals.append(planned)
    return GemmPlan(DENSE, "; ".join(refusals or elsewhere))


def plan_packed(problem: GemmProblem, device: torch.device) -> GemmPlan:
    """How to run a linear layer with a packed weight.

    Few tokens on a GPU, and as many on a CPU as the kernel is known to win for, take a kernel that reads the weight
    packed. Otherwise an operand is made: compressed where a sparse algorithm is known to be faster, once of a frozen
    weight; or else dense, in every call.

    Args:
        problem: of `linear_problem`; with `is_int8=True` for int8 values, and the weight's `pattern`.
        device: where the operands are.

    Returns:
        The plan, for `packed_linear`.

    Raises:
        ValueError: `problem` is no GemmProblem, or `device` no device.
    """
    check_is(GemmProblem, "plan_packed", problem=problem)
    check_is(torch.device, "plan_packed", device=device)
    planned = PACKED.plan(problem, device, False)
    if isinstance(planned, GemmPlan):
        return planned
    if not problem.pattern.is_within_24:
        return GemmPlan(DENSE, f"{planned}; sparse tensor cores multiply 2:4, not {problem.pattern}")
    # Of a dense copy, in the dtype of the result.
    plan = plan_gemm(problem._replace(is_int8=False, pattern=Pattern(2, 4)), device)
    return plan._replace(reason=f"{planned}; {plan.reason}")


def in_words(plans: Iterable[GemmPlan]) -> str:
    """How many GEMMs run sparse and how many dense, each with its most frequent reason."""
    reasons: dict[str, Counter[str]] = {"sparse": Counter(), "dense": Counter()}
    for plan in plans:
        reasons["sparse" if plan.is_sparse else "dense"][plan.reason] += 1
    return ", ".join(f"{x.total()} {how} ({x.most_common(1)[0][0]})" for how, x in reasons.items() if x)


def compress(matrix: Tensor | Packed, plan: GemmPlan) -> Operand:
    """A 2:4 matrix `[m, k]` as the backend of a plan multiplies by it.

    Not checked: the matrix must be 2:4 along k and free of -0.0. What cuSPARSELt compresses, `[m, 9 k / 16]` or more
    where it pads, belongs to the device and the library's version: never save it (`pack_nm` is for that).

    Args:
        matrix: dense with zeros, in the dtype of the GEMM, or packed (`pack_nm`).
        plan: of its GEMM.

    Returns:
        The operand, for `sparse_linear` or `sparse_mm` with the same plan. For dense math it is the matrix itself.

    Raises:
        ValueError: a dtype, size or device that the backend does not take.
    """
    check_is(GemmPlan, "compress", plan=plan)
    if isinstance(matrix, Packed):
        check_packed("compress", matrix)
        check_matrix("compress", values=matrix.values)
    else:
        check_floating("compress", matrix=matrix)
        check_matrix("compress", matrix=matrix)
    return plan.backend.encode(matrix)
