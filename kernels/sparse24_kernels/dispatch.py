"""Which implementation of an operator runs, and why: plain PyTorch, or kernels where the device has them.

An implementation is a table of functions (`Operators`); one operator is enough. `reference` has all of them and runs
everywhere. The others are checked on first use. To add one, append an `Implementation` to `IMPLEMENTATIONS`.
"""

import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import first_use, hard_problems, reference
from .checks import check_is, check_one_of
from .cpu import OPERATORS as CPU_OPERATORS
from .cpu.library import load as load_cpu_kernels
from .cpu.library import loaded
from .operators import Operators

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Choice(NamedTuple):
    """The implementation that was chosen, such as `"triton"`, `"cpu"` or `"reference"`, and the reason in words."""

    implementation: str
    reason: str


class Implementation(NamedTuple):
    """Some of the operators, and where they run.

    Attributes:
        load: returns its functions. Called once `unsupported` returned None, so that importing this library needs none
            of its dependencies.
        unsupported: why it does not run on a device, for tensors of a dtype; None where it does.
        where: what it runs on, in words, where it runs.
        made_of: see `first_use.Subject`.
    """

    name: str
    load: Callable[[], Operators]
    unsupported: Callable[[torch.device, torch.dtype], str | None]
    where: Callable[[torch.device], str]
    made_of: Callable[[], str] = str


def choose_kernels(device: torch.device, dtype: torch.dtype = torch.float32, operator: str = "prune") -> Choice:
    """Which implementation of an operator (a field of `Operators`) runs on a device, for tensors of a dtype, and why.

    Triton's kernels run 2:4 on compute capability 8.0 or more, those in C++ N:M with M up to 64 on CPUs; both take
    fp32, bf16 and fp16. `"reference"`, plain PyTorch, runs what all others refuse. ValueError: an argument of
    another type.
    """
    check_is(torch.device, "choose_kernels", device=device)
    check_is(torch.dtype, "choose_kernels", dtype=dtype)
    check_one_of(NAMES, operator=operator)
    return choose(operator, device, dtype)[1]


def implementation(operator: str, tensor: Tensor) -> Callable[..., Any]:
    """The function that computes an operator on the device of `tensor`."""
    return choose(operator, tensor.device, tensor.dtype)[0]


@cache
def choose(operator: str, device: torch.device, dtype: torch.dtype) -> tuple[Callable[..., Any], Choice]:
    """The function of an operator, with its implementation's name and the reason. Every operator passes here once."""
    refusals = []
    for each in IMPLEMENTATIONS:
        reason = each.unsupported(device, dtype) or _wrong(each, operator, device, dtype)
        if reason is None:
            return getattr(each.load(), operator), Choice(each.name, each.where(device))
        refusals.append(reason)
    return getattr(reference.OPERATORS, operator), Choice("reference", "; ".join(refusals))


def _wrong(each: Implementation, operator: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why an operator is not used: it is not there, or failed its check on first use. None where it is right."""
    try:
        if getattr(each.load(), operator) is None:
            return f"{each.name} has no {operator}"
    except Exception as error:  # of what it imports
        return f"{each.name} cannot be imported: {type(error).__name__}: {error}"
    for of in (dtype,) if dtype.is_floating_point else KERNEL_DTYPES:  # indices tell nothing of their values
        reason = first_use.verdict(subject(each, device, of), operator)
        if reason:
            return f"{each.name} failed its check on first use: {reason}"
    return None


def subject(each: Implementation, device: torch.device, dtype: torch.dtype) -> first_use.Subject:
    """All operators of an implementation, to be compared with the reference."""
    operators = [name for name, function in vars(each.load()).items() if function is not None]
    file = Path(getattr(sys.modules[each.load.__module__], "__file__", None) or "")
    # A verdict holds for a source, and of a notebook, which has no file, for this process.
    source = hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else f"process {os.getpid()}"
    check = partial(_first_difference, each.load, device, dtype)
    return first_use.Subject(each.name, operators, device, dtype, check, f"{each.made_of()}, {source}")


def _first_difference(load: Callable[[], Operators], device: torch.device, dtype: torch.dtype, operator: str) -> str:
    return hard_problems.first_difference(operator, getattr(load(), operator), device, dtype)


def _triton_unsupported(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"Triton's kernels need a CUDA device, not {device.type}"
    if dtype.is_floating_point and dtype not in KERNEL_DTYPES:  # masks and indices are bytes
        return f"the kernels take fp32, bf16 and fp16, not {dtype}"
    if not torch.cuda.is_available():
        return "this build of torch, or this machine, has no CUDA"
    if torch.version.hip is not None:
        return "Triton's kernels were never tried on AMD GPUs"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"the kernels need compute capability 8.0 or more: {torch.cuda.get_device_name(device)}"
    return None


def _cpu_unsupported(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cpu":
        return f"the kernels in C++ need a CPU, not {device.type}"
    if dtype.is_floating_point and dtype not in KERNEL_DTYPES:
        return f"the kernels take fp32, bf16 and fp16, not {dtype}"
    library = load_cpu_kernels()
    return library if isinstance(library, str) else None


def _load_gpu() -> Operators:
    from .gpu import OPERATORS  # imports Triton

    return OPERATORS


def _load_cpu() -> Operators:
    return CPU_OPERATORS


NAMES = tuple(field.name for field in fields(Operators))
IMPLEMENTATIONS = [
    Implementation(
        "triton",
        _load_gpu,
        _triton_unsupported,
        lambda device: f"Triton on {torch.cuda.get_device_name(device)}",
        lambda: f"Triton {version('triton')}",
    ),
    Implementation(
        "cpu",
        _load_cpu,
        _cpu_unsupported,
        lambda device: f"C++ kernels, path {loaded().path!r}",
        lambda: f"{loaded().file.name}, path {loaded().path}",
    ),
]
"""Asked in order, before `reference`."""
