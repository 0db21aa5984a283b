"""`hf-sparse24 doctor`: what runs where and why, whether it is right, and what a model would gain."""

import math
import platform
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch
from sparse24_kernels import Pattern, dispatch, first_use
from sparse24_kernels.dispatch import choose_kernels
from sparse24_kernels.gemm import GemmPlan, GemmProblem, autotune, cusparselt, linear_problem, plan_gemm, plan_packed
from torch import nn

from ..version import __version__
from ..weights.sparse_weight import SparseWeight, sparse_weights


def versions() -> list[tuple[str, str]]:
    found = [("hf_sparse24", __version__), ("python", platform.python_version())]
    for name in ("torch", "triton", "transformers", "accelerate", "peft"):
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            found.append((name, "not installed"))
    found.append(("CUDA of torch", torch.version.cuda or "none: a CPU build"))
    found.append(("cuSPARSELt", str(cusparselt.version() or "not in this build of torch")))
    return found


def devices() -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or [torch.device("cpu")]


def choices(device: torch.device) -> list[tuple[str, str, str]]:
    """Rows of each kind of work on `device`: the work, what runs it, and why."""
    rows = [("pruning, masks, MVUE", *choose_kernels(device, torch.bfloat16))]
    for dtype in (torch.float32, torch.bfloat16)[device.type != "cpu" :]:
        plan = plan_gemm(linear_problem(8192, 4096, 4096, dtype), device)
        rows.append((f"GEMMs of 4096 x 4096 in {dtype}".replace("torch.", ""), plan.backend.name, plan.reason))
    rows.append(("packed weights", *choose_kernels(device, torch.bfloat16, operator="packed_linear")))
    for dtype, values, pattern in _PACKED:
        problem = linear_problem(1, 2048, 2048, dtype)._replace(is_int8=values is torch.int8, pattern=pattern)
        what = f"  {pattern} of {str(values or dtype).removeprefix('torch.')}, 1 token"
        try:
            plan = plan_packed(problem, device)
            rows.append((what, plan.backend.name, plan.reason))
        except RuntimeError as error:  # a cuSPARSELt that cannot compress
            rows.append((what, "none", str(error)))
    if cusparselt.unsupported_device(device) is None:
        reason = cusparselt.not_direct(device)
        rows.append(("  calls of cuSPARSELt", "torch" if reason else "direct", reason or "with plans that are kept"))
    is_slow = cusparselt.version() == 800  # of CUDA 13 builds of torch up to 2.11, on Ada and Hopper
    if is_slow and device.type == "cuda" and torch.cuda.get_device_capability(device) in ((8, 9), (9, 0)):
        rows.append(("", "warning", "cuSPARSELt 0.8.0 is slow on this GPU: 0.8.1 fixed that"))
    return rows


class Checked(NamedTuple):
    """The result of the check of an operator: `failure` is "", or the first difference."""

    implementation: str
    operator: str
    dtype: str
    failure: str


def checks(device: torch.device, again: bool = False) -> list[Checked]:
    """The checks of all kernels that run on a device; `again` repeats them, in a child process that may crash."""
    subjects = []
    for dtype in dispatch.KERNEL_DTYPES:
        running = [each for each in dispatch.IMPLEMENTATIONS if not each.unsupported(device, dtype)]
        subjects += [dispatch.subject(each, device, dtype) for each in running]
        if not (cusparselt.unsupported_device(device) or cusparselt.unsupported_matrix(128, 128, dtype)):
            subjects.append(cusparselt.subject(device, dtype, cusparselt.checked(device)))
    if again:
        found = first_use.check_in_child(subjects)
    else:
        found = [(one, operator, first_use.verdict(one, operator)) for one in subjects for operator in one.operators]
    return [Checked(one.name, operator, str(one.dtype).removeprefix("torch."), why) for one, operator, why in found]


def check_rows(checked: list[Checked]) -> list[list[str]]:
    """A row for each operator: its implementation, its name, and "ok" or what failed."""
    rows = []
    for name, operator in dict.fromkeys(check[:2] for check in checked):
        alike = [check for check in checked if check[:2] == (name, operator)]
        failed = [f"{check.dtype}: {check.failure}" for check in alike if check.failure]
        rows.append([name, operator, f"FAILED, PyTorch runs: {'; '.join(failed)}" if failed else "ok"])
    return rows or [["no kernels", "", "PyTorch runs everything"]]


_PACKED = (
    *((dtype, None, Pattern(2, 4)) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
    (torch.bfloat16, torch.int8, Pattern(2, 4)),
    (torch.bfloat16, None, Pattern(16, 32)),
)


def gemm_plans(weight: SparseWeight, tokens: int, dtype: torch.dtype, device: torch.device) -> dict[str, GemmPlan]:
    """The plans of a layer's three GEMMs in training, as the layer asks for them; not of a stack of experts."""
    sizes, backend = weight.sizes, weight.run.backend
    return {gemm.name: gemm.plan(tokens, *sizes, dtype, device, backend) for gemm in weight.method.gemms}


def problems(model: nn.Module, tokens: int, dtype: torch.dtype, device: torch.device) -> list[GemmProblem]:
    """The different sparse GEMMs that training a patched model asks for, which `hf-sparse24 tune` tunes; none of a
    stack of experts."""
    found = []
    for weight in sparse_weights(model).values():
        for gemm in [] if weight.is_stack else weight.method.gemms:
            problem = gemm.problem(tokens, *weight.sizes, dtype)
            if problem is not None and autotune.unsupported_matrix(problem, device) is None:
                found.append(problem)
    return list(dict.fromkeys(found))


def gains(model: nn.Module, tokens: int, dtype: torch.dtype, device: torch.device) -> list[list[str]]:
    """Rows of the predicted gain in training: number of layers, out x in, what runs each GEMM with its speed-up, the
    layer's, "?" where nothing was measured. A GEMM that is always dense counts as the dense output GEMM."""
    rows: Counter[tuple[str, ...]] = Counter()
    for weight in sparse_weights(model).values():
        out, inputs = weight.sizes
        if weight.is_stack:
            reason = "dense: stacked experts: no sparse grouped GEMM"
            rows[f"{len(weight.parameter)} x {out} x {inputs}", reason, reason, reason, "1.00x"] += 1
            continue
        cells, before, after = [], 0.0, 0.0
        usual = linear_problem(tokens, out, inputs, dtype)
        for gemm, plan in zip(weight.method.gemms, gemm_plans(weight, tokens, dtype, device).values()):
            verdict = autotune.verdict_of(gemm.problem(tokens, out, inputs, dtype) or usual, device)
            dense_us, sparse_us = verdict.dense_us or math.nan, verdict.sparse_us or math.nan
            took_us = sparse_us if plan.is_sparse else dense_us
            gain = "" if math.isnan(sparse_us) else f" {dense_us / sparse_us:.2f}x"
            cells.append(f"sparse{gain}" if plan.is_sparse else f"dense: {plan.reason}")
            before, after = before + dense_us, after + took_us
        rows[f"{out} x {inputs}", *cells, "?" if math.isnan(after) else f"{before / after:.2f}x"] += 1
    return [[str(count), *row] for row, count in rows.items()]
