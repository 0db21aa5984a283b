"""Which backend runs a GEMM, by which algorithm, and how it stores the sparse operand. Every plan has its reason."""

import operator
from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import check_is
from ..dispatch import Choice
from ..formats import Compression
from . import autotune, cusparselt
from .backend import DENSE, GemmBackend
from .cusparselt import CUSPARSELT
from .layout import find_compression
from .packed import PACKED
from .problem import Algorithm, GemmProblem

BACKENDS = ("dense", "cusparselt")
"""Backends of the GEMMs that can be requested. `"dense"` is dense math on the pruned values, on any device;
`"cusparselt"` runs on Nvidia's sparse tensor cores. A third, `"packed"`, is for packed weights (`plan_packed`)."""

FEW_TOKENS = 64
"""Tokens that a packed weight is multiplied by as it is. Reading it takes longer than multiplying until then, and any
other way moves four times the bytes: it is written dense, and read again. An estimate, not measured."""


class GemmPlan(NamedTuple):
    """How one GEMM runs, and why.

    Attributes:
        backend: `"dense"`, `"cusparselt"`, or, of `plan_packed` alone, `"packed"`.
        reason: in words, with the measured times where there are any.
        algorithm: what `sparse_linear` and `sparse_mm` take; None except for `"cusparselt"`.
        compression: what `compress`, `prune_forms` and `mvue` take; None except for `"cusparselt"`.
    """

    backend: str
    reason: str
    algorithm: Algorithm | None
    compression: Compression | None

    @property
    def is_sparse(self) -> bool:
        """Whether the sparse operand has to be compressed."""
        return self.algorithm is not None


def check_backend(requested: str) -> None:
    if requested != "auto" and requested not in BACKENDS:
        raise ValueError(f"backend={requested!r} is not available; choose 'auto' or one of {list(BACKENDS)}")


def choose_backend(requested: str, device: torch.device) -> Choice:
    """Turn `"auto"` or a backend's name into the backend that may run on `device`, with the reason in words.

    Where that is `"cusparselt"`, `plan_gemm` still decides every GEMM by itself.

    Args:
        requested: `"auto"`, or one of `BACKENDS`.
        device: where the GEMMs run.

    Returns:
        `"dense"` or `"cusparselt"`, with the reason.

    Raises:
        ValueError: `requested` is not `"auto"` or one of `BACKENDS`, or it is `"cusparselt"` where that cannot run.
    """
    check_backend(requested)
    check_is(torch.device, "choose_backend", device=device)
    if requested == "dense":
        return Choice("dense", "requested")
    reason = cusparselt.unsupported_device(device)
    if requested == "cusparselt":
        if reason:
            raise ValueError(f"backend='cusparselt': {reason}; use 'auto'")
        return Choice("cusparselt", "requested")
    if reason:
        return Choice("dense", reason)
    return Choice("cusparselt", "where a tuned GEMM beats dense, otherwise dense math")


def plan_gemm(problem: GemmProblem, device: torch.device, backend: str = "auto") -> GemmPlan:
    """How to run `problem` on `device`. The plan decides which form of the sparse operand is needed.

    Measurements, and a graph of torch.compile, hold for all n of one bucket: close sizes share one measurement.

    Args:
        problem: of `linear_problem` or `mm_problem`; n may be symbolic while torch.compile traces.
        device: where the operands are.
        backend: `"auto"` chooses a sparse algorithm only where a measurement, with checked results, says that it is
            faster. `"cusparselt"` takes the fastest known sparse algorithm even where dense is faster, and the
            library's default one where nothing was measured; dense math runs where every algorithm failed its checks.
            `"dense"` is dense math.

    Returns:
        The plan, with its reason. Dense math where nothing was measured (`hf-sparse24 tune` measures).

    Raises:
        ValueError: an unknown backend, or `"cusparselt"` where `device` cannot run it.

    Examples:
        >>> problem = linear_problem(tokens=4096, out=4096, inputs=1024, dtype=torch.bfloat16)
        >>> plan = plan_gemm(problem, torch.device("cpu"))
        >>> plan.backend, plan.is_sparse
        ('dense', False)
    """
    check_is(GemmProblem, "plan_gemm", problem=problem)
    choice = choose_backend(backend, device)
    if choice.backend == "dense":
        return _dense(choice.reason)
    reason = CUSPARSELT.unsupported(problem, device)
    if reason:
        return _dense(reason)
    verdict = autotune.choose(problem, device)
    algorithm, reason = verdict.algorithm, verdict.reason
    if backend == "cusparselt":
        algorithm = algorithm if verdict.measured else Algorithm()
        reason = f"requested; {reason}"
    elif verdict.backend == "dense":
        algorithm = None
    if algorithm is None:
        return _dense(reason)
    # `index` specialises symbolic sizes: a compressed matrix has one size.
    m, k = operator.index(problem.m), operator.index(problem.k)
    return GemmPlan("cusparselt", reason, algorithm, find_compression(m, k, problem.dtype, device))


def _dense(reason: str) -> GemmPlan:
    return GemmPlan("dense", reason, None, None)


def gemm_unsupported(problem: GemmProblem, device: torch.device, backend: str = "auto") -> str | None:
    """Why the sparse operand `[m, k]` cannot go to sparse tensor cores, whatever the speed.

    Args:
        problem: of `linear_problem` or `mm_problem`.
        device: where the operands are.
        backend: `"auto"` or one of `BACKENDS`.

    Returns:
        The reason in words; None where it can.

    Raises:
        ValueError: an unknown backend, a `problem` that is no GemmProblem, or a `device` that is no device.
    """
    check_backend(backend)
    check_is(GemmProblem, "gemm_unsupported", problem=problem)
    check_is(torch.device, "gemm_unsupported", device=device)
    return "backend='dense'" if backend == "dense" else CUSPARSELT.unsupported(problem, device)


def plan_packed(problem: GemmProblem, device: torch.device) -> GemmPlan:
    """How to run a linear layer with a packed weight.

    Few tokens on a GPU take the kernel that reads the weight packed. Otherwise an operand is made in every call:
    compressed where a sparse algorithm is known to be faster, or else dense. On a CPU it is dense.

    Args:
        problem: of `linear_problem`.
        device: where the operands are.

    Returns:
        The plan, for `packed_linear`.

    Raises:
        ValueError: `problem` is no GemmProblem, or `device` no device.
    """
    check_is(GemmProblem, "plan_packed", problem=problem)
    check_is(torch.device, "plan_packed", device=device)
    reason = PACKED.unsupported(problem, device)
    if reason is None and problem.n <= FEW_TOKENS:
        return GemmPlan("packed", f"at most {FEW_TOKENS} tokens: the time is that of reading the weight", None, None)
    plan = plan_gemm(problem, device)
    return plan._replace(reason=f"{reason or f'more than {FEW_TOKENS} tokens'}; {plan.reason}")


def backend_of(algorithm: Algorithm | None) -> GemmBackend[Tensor]:
    """The backend that runs an algorithm of a plan, of dense and compressed operands."""
    return DENSE if algorithm is None else CUSPARSELT
