"""Which implementation runs, and why. Nothing falls back in silence: every choice carries its reason.

Two choices are made. The pruning functions have a `reference` in PyTorch and kernels in Triton, and the tensor decides
(`choose_kernels`). The matrix product has backends that a config can name (`choose_backend`).
"""

from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from . import cusparselt, tuner

BACKENDS = ("reference", "cusparselt")
"""Implementations of the sparse products. `reference` is dense math on the pruned values, on any device; `cusparselt`
runs on Nvidia's sparse tensor cores."""

TRITON_NEEDED = (3, 6)
"""The oldest release that the kernels are compiled with in the tests' reach; it came with torch 2.11."""

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Choice(NamedTuple):
    backend: str
    reason: str


class Product(NamedTuple):
    """What runs one product: an algorithm of a sparse backend, or None for dense math; and why."""

    algorithm: cusparselt.Algorithm | None
    reason: str


def check_backend(requested: str) -> None:
    if requested != "auto" and requested not in BACKENDS:
        raise ValueError(f"backend={requested!r} is not available; choose 'auto' or one of {list(BACKENDS)}")


def choose_backend(requested: str, device: torch.device) -> Choice:
    """Turn `"auto"` or a backend's name into the backend that may run on `device`, with the reason in words.

    Where it is `cusparselt`, every product is still decided by itself (`choose_product`).

    Raises:
        ValueError: `requested` is not `"auto"` or one of `BACKENDS`, or it is `"cusparselt"` where that cannot run.
    """
    check_backend(requested)
    if requested == "reference":
        return Choice("reference", "requested")
    obstacle = cusparselt.why_not(device)
    if requested == "cusparselt":
        if obstacle:
            raise ValueError(f"backend='cusparselt': {obstacle}; use 'auto'")
        return Choice("cusparselt", "requested")
    if obstacle:
        return Choice("reference", obstacle)
    return Choice("cusparselt", "where a tuned product beats dense, otherwise dense math")


def choose_product(requested: str, problem: cusparselt.Problem, device: torch.device) -> Product:
    """How to run one product. `"auto"` takes a sparse algorithm only where a measured, checked entry says it wins.

    `"cusparselt"` takes the fastest known sparse algorithm even where dense is faster, and the library's default one
    where nothing was tuned; dense math runs where every algorithm failed its checks.
    """
    choice = choose_backend(requested, device)
    if choice.backend == "reference":
        return Product(None, choice.reason)
    obstacle = cusparselt.why_not_matrix(problem.m, problem.k, problem.dtype)
    if obstacle:
        return Product(None, obstacle)
    verdict = tuner.choose(problem, device)
    if requested == "cusparselt":
        untried = verdict.reason == tuner.NOT_TUNED
        return Product(cusparselt.Algorithm() if untried else verdict.algorithm, f"requested; {verdict.reason}")
    if verdict.backend == "dense":
        return Product(None, verdict.reason)
    return Product(verdict.algorithm, verdict.reason)


@cache
def choose_kernels(device: torch.device, dtype: torch.dtype = torch.float32, fp8: bool = False) -> Choice:
    """What works on tensors of `dtype` on `device`: `"triton"` or `"reference"`, with the reason in words.

    Triton serves 2:4 (and MVUE's 1:2) on CUDA devices from Ampere on, and from Hopper on where the result is FP8 (older
    ones round it twice, or not at all). Other patterns run the reference everywhere.
    """
    if device.type != "cuda":
        return Choice("reference", f"the kernels need a CUDA device, not {device.type}")
    if dtype.is_floating_point and dtype not in KERNEL_DTYPES:  # masks and indices are bytes
        return Choice("reference", f"the kernels take fp32, bf16 and fp16, not {dtype}")
    if not torch.cuda.is_available():
        return Choice("reference", "this build of torch, or this machine, has no CUDA")
    if find_spec("triton") is None:
        return Choice("reference", "Triton is not installed: pip install triton")
    if tuple(map(int, version("triton").split(".")[:2])) < TRITON_NEEDED:
        needed = ".".join(map(str, TRITON_NEEDED))
        return Choice("reference", f"Triton {version('triton')} is too old, {needed} is needed: pip install -U triton")
    name, needed = torch.cuda.get_device_name(device), (9, 0) if fp8 else (8, 0)
    if torch.cuda.get_device_capability(device) < needed:
        what = "FP8 results need" if fp8 else "the kernels need"
        return Choice("reference", f"{what} compute capability {needed[0]}.{needed[1]} or more: {name}")
    return Choice("triton", f"Triton on {name}")


def implementation(tensor: Tensor, pattern_has_kernels: bool = True, fp8: bool = False) -> ModuleType:
    """The room that serves `tensor`: `reference` or `gpu`. Both hold the same functions, file by file."""
    if pattern_has_kernels and choose_kernels(tensor.device, tensor.dtype, fp8).backend == "triton":
        from . import gpu  # on first use: importing the package must not need Triton

        return gpu
    from . import reference

    return reference
