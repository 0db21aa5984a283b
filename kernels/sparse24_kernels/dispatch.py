"""Which implementation of the pruning functions runs, the PyTorch `reference` or the Triton kernels `gpu`, and why."""

from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_is

OLDEST_TRITON = (3, 6)
"""Oldest Triton that the tests compile with. It came with torch 2.11."""

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Choice(NamedTuple):
    """What was chosen, and the reason in words.

    Attributes:
        backend: its name: `"triton"` or `"reference"` of `choose_kernels`, `"dense"` or `"cusparselt"` of
            `choose_backend`.
        reason: for people, such as `"the kernels need a CUDA device, not cpu"`.
    """

    backend: str
    reason: str


def choose_kernels(device: torch.device, dtype: torch.dtype = torch.float32, fp8: bool = False) -> Choice:
    """Which implementation of the pruning functions runs on a device, and why.

    The Triton kernels run 2:4 (and 1:2 of `mvue`) on CUDA devices of compute capability 8.0 (Ampere) or more, and of
    9.0 (Hopper) or more where the result is FP8: older devices round to FP8 twice, or cannot convert to it. Other
    patterns run the reference everywhere.

    Args:
        device: where the tensors are.
        dtype: theirs. The kernels take fp32, bf16 and fp16; masks and other bytes are no obstacle.
        fp8: whether the result is FP8.

    Returns:
        `"triton"` or `"reference"` (plain PyTorch, on any device), with the reason in words.

    Raises:
        ValueError: an argument of another type.

    Examples:
        >>> choose_kernels(torch.device("cpu")).backend
        'reference'
    """
    check_is(torch.device, "choose_kernels", device=device)
    check_is(torch.dtype, "choose_kernels", dtype=dtype)
    check_is(bool, "choose_kernels", fp8=fp8)
    return _choose_kernels(device, dtype, fp8)


@cache
def _choose_kernels(device: torch.device, dtype: torch.dtype, fp8: bool) -> Choice:
    if device.type != "cuda":
        return Choice("reference", f"the kernels need a CUDA device, not {device.type}")
    if dtype.is_floating_point and dtype not in KERNEL_DTYPES:  # masks and indices are bytes
        return Choice("reference", f"the kernels take fp32, bf16 and fp16, not {dtype}")
    if not torch.cuda.is_available():
        return Choice("reference", "this build of torch, or this machine, has no CUDA")
    if find_spec("triton") is None:
        return Choice("reference", "Triton is not installed: pip install triton")
    if tuple(map(int, version("triton").split(".")[:2])) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return Choice("reference", f"Triton {version('triton')} is too old, {oldest} is needed: pip install -U triton")
    name, needed = torch.cuda.get_device_name(device), (9, 0) if fp8 else (8, 0)
    if torch.cuda.get_device_capability(device) < needed:
        what = "FP8 results need" if fp8 else "the kernels need"
        return Choice("reference", f"{what} compute capability {needed[0]}.{needed[1]} or more: {name}")
    return Choice("triton", f"Triton on {name}")


def implementation(tensor: Tensor, pattern_has_kernels: bool = True, fp8: bool = False) -> ModuleType:
    """The package that implements operators on `tensor`: `reference` or `gpu`.

    Both have the same modules with the same functions and arguments.
    """
    if pattern_has_kernels and choose_kernels(tensor.device, tensor.dtype, fp8).backend == "triton":
        from . import gpu  # on first use: importing the package must not need Triton

        return gpu
    from . import reference

    return reference
