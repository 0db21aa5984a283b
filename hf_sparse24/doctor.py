"""What runs where and why, whether it is right here, and what a model would gain: what `hf-sparse24 doctor` prints."""

import math
import platform
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

import sparse24_kernels as kernels
import torch
from sparse24_kernels import cusparselt, tuner
from sparse24_kernels.cusparselt import Problem
from sparse24_kernels.layout import who_compresses
from torch import Tensor, nn

from .linear import Sparse24Layer
from .patching import patched_config, sparse_layers
from .version import __version__


def versions() -> list[tuple[str, str]]:
    """What is installed, as name and version."""
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
    """The devices a model could run on."""
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or [torch.device("cpu")]


def choices(device: torch.device) -> list[tuple[str, str, str]]:
    """What serves each kind of work on `device`: the work, what runs, and why."""
    rows = [
        ("pruning, masks, MVUE", *kernels.choose_kernels(device, torch.bfloat16)),
        ("FP8", *kernels.choose_kernels(device, torch.bfloat16, fp8=True)),
        ("products", *kernels.choose_backend("auto", device)),
    ]
    if cusparselt.why_not(device) is None:
        rows.append(("compressed operands", *who_compresses(device)))
    if device.type == "cuda" and cusparselt.is_slow_on(device):
        rows.append(("", "warning", f"cuSPARSELt {cusparselt.version()} is slow on this GPU: 0.8.1 mended that"))
    return rows


def self_test(device: torch.device) -> Iterator[tuple[str, str]]:
    """Every operation on `device` against the reference on the CPU: its name, and "ok" or what is wrong."""
    for name, function in _SELF_TESTS.items():
        yield name, _verdict(lambda function=function: _compare(function, device))
    obstacle = cusparselt.why_not(device)
    yield "sparse product", f"skipped: {obstacle}" if obstacle else _verdict(lambda: _check_product(device))


def _verdict(check: Callable[[], str]) -> str:
    try:
        return check()
    except Exception as error:  # a broken driver raises anything; the point is to say so and go on
        return f"FAILED: {type(error).__name__}: {error}"


_X = torch.arange(64 * 64, dtype=torch.float32).mul(0.7390851).sin().view(64, 64)
_KEY = torch.tensor(7)
_SELF_TESTS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "nm_mask": lambda x: [kernels.nm_mask(x, packed=True), kernels.nm_mask(x, dim=0)],
    "transposable_mask": lambda x: [kernels.transposable_mask(x)],
    "nm_prune": lambda x: [kernels.nm_prune(x, dtype=torch.bfloat16)],
    "soft_threshold": lambda x: [kernels.soft_threshold(x)],
    "pack_nm": lambda x: [*kernels.pack_nm(x), kernels.unpack_nm(kernels.pack_nm(x))],
    "mvue": lambda x: [kernels.mvue(x, dim=dim, key=_KEY.to(x.device)) for dim in (0, 1)],
    "masked_decay_": lambda x: [kernels.masked_decay_(x.clone(), x, kernels.nm_mask(x), 0.5)],
    "count_flips": lambda x: [kernels.count_flips([kernels.nm_mask(x)], [kernels.nm_mask(x, dim=0)])],
    "s_ste_scale": lambda x: [kernels.s_ste_scale(x)],
    "gated_activation": lambda x: [kernels.gated_activation(x, x.t(), "swiglu")],
    "fp8_simulate": lambda x: [kernels.fp8_simulate(x, "e4m3")],
}


def _compare(function: Callable[[Tensor], list[Tensor]], device: torch.device) -> str:
    for ours, theirs in zip(function(_X.to(device)), function(_X)):
        error = (ours.cpu().double() - theirs.double()).abs().max().item()
        if not error <= 1e-5 * theirs.double().abs().max().item():
            return f"FAILED: differs from the CPU by {error:.2g}"
    return "ok"


def _check_product(device: torch.device) -> str:
    matrix, ours = kernels.prune_forms(_X.to(device), ["dense", "compressed"], dtype=torch.bfloat16)
    x = _X.to(device, torch.bfloat16).roll(1, 0)
    truth = x.float() @ matrix.float().t()
    for who, compressed in (("cuSPARSELt", kernels.compress(matrix)), ("ours", ours)):
        result = kernels.sparse_linear(x, compressed, algorithm=cusparselt.Algorithm())
        error = ((result.float() - truth).norm() / truth.norm()).item()
        if not error < 1e-2:
            return f"FAILED: compressed by {who}, relative error {error:.2g}"
    return "ok"


def products(layer: Sparse24Layer, tokens: int, dtype: torch.dtype) -> dict[str, Problem | None]:
    """The three products of a layer in training: the problem of each that can be sparse, None for the others."""
    config = layer.method.config
    out, inputs = layer.sizes
    sparse_gradient = config.weight_grad in ("mvue", "mvue-approx") and tokens % 16 == 0
    sparse_input = layer.method.transposable and config.input_grad == "dense"
    return {
        "output": kernels.linear_problem(tokens, out, inputs, dtype),
        "grad_input": kernels.linear_problem(tokens, inputs, out, dtype) if sparse_input else None,
        "grad_weight": kernels.mm_problem(out, inputs, tokens, dtype) if sparse_gradient else None,
    }


def problems(model: nn.Module, tokens: int, dtype: torch.dtype) -> list[Problem]:
    """Every different sparse product that training a patched model asks for: what `hf-sparse24 tune` tunes."""
    found: dict[Problem, None] = {}
    for layer in sparse_layers(model).values():
        for problem in products(layer, tokens, dtype).values():
            if problem is not None and cusparselt.why_not_matrix(problem.m, problem.k, problem.dtype) is None:
                found[problem] = None
    return list(found)


def gains(model: nn.Module, tokens: int, dtype: torch.dtype, device: torch.device) -> list[list[str]]:
    """A table of the predicted gain of a patched model's layers in training, layers of one shape together.

    Columns: how many, out x in, what runs each of the three products and its speed-up over dense, and the layer's. A
    product that is always dense is taken to last as long as the measured dense output product, which has as many
    operations. Where a number is missing, nothing was measured.
    """
    backend = patched_config(model).backend
    counts: dict[tuple[str, ...], int] = {}
    for layer in sparse_layers(model).values():
        out, inputs = layer.sizes
        cells, before, after = [], 0.0, 0.0
        parts = products(layer, tokens, dtype)
        usual_us = tuner.choose(parts["output"], device).dense_us or math.nan
        for name, problem in parts.items():
            if problem is None:
                odd = name == "grad_weight" and layer.method.config.weight_grad != "dense" and tokens % 16
                cells.append(f"dense: {tokens} tokens are no multiple of 16" if odd else "dense")
                before, after = before + usual_us, after + usual_us
                continue
            product, verdict = kernels.choose_product(backend, problem, device), tuner.choose(problem, device)
            dense_us, sparse_us = verdict.dense_us or math.nan, verdict.sparse_us or math.nan
            took_us = dense_us if product.algorithm is None else sparse_us
            cells.append(
                f"dense: {product.reason}" if product.algorithm is None else f"sparse {dense_us / took_us:.2f}x"
            )
            before, after = before + dense_us, after + took_us
        row = (f"{out} x {inputs}", *cells, "?" if math.isnan(after) else f"{before / after:.2f}x")
        counts[row] = counts.get(row, 0) + 1
    return [[str(count), *row] for row, count in counts.items()]
