"""`hf-sparse24 doctor`: what runs where and why, whether it is right, and what a model would gain."""

import math
import platform
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

import sparse24_kernels as kernels
import torch
from sparse24_kernels.dispatch import choose_kernels
from sparse24_kernels.fp8 import fp8_simulate
from sparse24_kernels.gemm import GemmPlan, GemmProblem, autotune, cusparselt, linear_problem, plan_packed
from sparse24_kernels.gemm.backend import DENSE
from sparse24_kernels.gemm.planning import choose_backend
from sparse24_kernels.masks import count_flips
from torch import Tensor, nn

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
    """What runs each kind of work on `device`: the work, what runs it, and why."""
    rows = [
        ("pruning, masks, MVUE", *choose_kernels(device, torch.bfloat16)),
        ("GEMMs", *choose_backend("auto", device)),
        ("packed weights", *choose_kernels(device, torch.bfloat16, operator="packed_linear")),
    ]
    for dtype, values in _PACKED:
        problem = linear_problem(1, 2048, 2048, dtype)._replace(sparse_dtype=values)
        kind = str(values or dtype).removeprefix("torch.")
        try:
            plan = plan_packed(problem, device)
            rows.append((f"  {kind} values, 1 token", plan.backend.name, plan.reason))
        except RuntimeError as error:  # a cuSPARSELt that cannot compress
            rows.append((f"  {kind} values, 1 token", "none", str(error)))
    if device.type == "cuda" and cusparselt.is_slow_on(device):
        rows.append(("", "warning", f"cuSPARSELt {cusparselt.version()} is slow on this GPU: 0.8.1 fixed that"))
    return rows


def self_test(device: torch.device) -> Iterator[tuple[str, str]]:
    """Every operation on `device` against PyTorch in fp64 on the CPU: its name, and "ok" or the error."""
    for name, function in _SELF_TESTS.items():
        try:
            yield name, _compare(function, device)
        except Exception as error:  # a broken driver raises anything; the point is to say so and go on
            yield name, f"FAILED: {type(error).__name__}: {error}"


_PACKED = ((torch.bfloat16, None), (torch.float16, None), (torch.float32, None), (torch.bfloat16, torch.int8))
_X = torch.arange(64 * 64, dtype=torch.float32).mul(0.7390851).sin().view(64, 64)
_KEY = torch.tensor(7)
_NO_GROUPED_GEMM = "stacked experts: no sparse grouped GEMM"
_SELF_TESTS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "nm_mask": lambda x: [kernels.nm_mask(x, packed=True), kernels.nm_mask(x, dim=0)],
    "transposable_mask": lambda x: [kernels.transposable_mask(x)],
    "nm_prune": lambda x: [kernels.nm_prune(x, dtype=torch.bfloat16)],
    "soft_threshold": lambda x: [kernels.soft_threshold(x)],
    "pack_nm": lambda x: [*kernels.pack_nm(x)[:2], kernels.unpack_nm(kernels.pack_nm(x))],
    "packed_linear": lambda x: [kernels.packed_linear(x[:8], kernels.pack_nm(x))],
    "mvue": lambda x: [kernels.mvue(x, dim=dim, key=_KEY.to(x.device)) for dim in (0, 1)],
    "masked_decay_": lambda x: [kernels.masked_decay_(x.clone(), x, kernels.nm_mask(x), 0.5)],
    "count_flips": lambda x: [count_flips([kernels.nm_mask(x)], [kernels.nm_mask(x, dim=0)])],
    "s_ste_scale": lambda x: [kernels.s_ste_scale(x)],
    "gated_activation": lambda x: [kernels.gated_activation(x, x.t(), "swiglu")],
    "fp8_simulate": lambda x: [fp8_simulate(x, "e4m3")],
}


def _compare(function: Callable[[Tensor], list[Tensor]], device: torch.device) -> str:
    for ours, theirs in zip(function(_X.to(device)), function(_X.double())):  # no kernel takes fp64
        error = (ours.cpu().double() - theirs.double()).abs().max().item()
        if not error <= 1e-5 * theirs.double().abs().max().item():
            return f"FAILED: differs from fp64 by {error:.2g}"
    return "ok"


def gemm_plans(weight: SparseWeight, tokens: int, dtype: torch.dtype, device: torch.device) -> dict[str, GemmPlan]:
    """The plans of a layer's three GEMMs in training, as the layer asks for them."""
    if weight.is_stack:
        return dict.fromkeys(("output", "grad_input", "grad_weight"), GemmPlan(DENSE, _NO_GROUPED_GEMM))
    sizes, backend = weight.sizes, weight.run.backend
    return {gemm.name: gemm.plan(tokens, *sizes, dtype, device, backend) for gemm in weight.method.gemms}


def sparse_problems(weight: SparseWeight, tokens: int, dtype: torch.dtype) -> dict[str, GemmProblem]:
    """The GEMMs of a layer that sparse tensor cores can run, by name; none of a stack of experts."""
    found: dict[str, GemmProblem] = {}
    for gemm in [] if weight.is_stack else weight.method.gemms:
        problem = gemm.problem(tokens, *weight.sizes, dtype)
        if problem is not None and cusparselt.unsupported_matrix(problem.m, problem.k, problem.dtype) is None:
            found[gemm.name] = problem
    return found


def problems(model: nn.Module, tokens: int, dtype: torch.dtype) -> list[GemmProblem]:
    """The different sparse GEMMs that training a patched model asks for, which `hf-sparse24 tune` tunes."""
    weights = sparse_weights(model).values()
    return list(dict.fromkeys(p for weight in weights for p in sparse_problems(weight, tokens, dtype).values()))


def gains(model: nn.Module, tokens: int, dtype: torch.dtype, device: torch.device) -> list[list[str]]:
    """Rows of the predicted gain in training: number of layers, out x in, what runs each GEMM with its speed-up, the
    layer's, "?" where nothing was measured. A GEMM that is always dense counts as the dense output GEMM."""
    rows: Counter[tuple[str, ...]] = Counter()
    for weight in sparse_weights(model).values():
        out, inputs = weight.sizes
        plans = gemm_plans(weight, tokens, dtype, device)
        if weight.is_stack:
            reason = f"dense: {_NO_GROUPED_GEMM}"
            rows[f"{len(weight.parameter)} x {out} x {inputs}", reason, reason, reason, "1.00x"] += 1
            continue
        cells, before, after = [], 0.0, 0.0
        usual = linear_problem(tokens, out, inputs, dtype)
        for gemm in weight.method.gemms:
            plan = plans[gemm.name]
            verdict = autotune.choose(gemm.problem(tokens, out, inputs, dtype) or usual, device)
            dense_us, sparse_us = verdict.dense_us or math.nan, verdict.sparse_us or math.nan
            took_us = sparse_us if plan.is_sparse else dense_us
            cells.append(f"sparse {dense_us / took_us:.2f}x" if plan.is_sparse else f"dense: {plan.reason}")
            before, after = before + dense_us, after + took_us
        rows[f"{out} x {inputs}", *cells, "?" if math.isnan(after) else f"{before / after:.2f}x"] += 1
    return [[str(count), *row] for row, count in rows.items()]
