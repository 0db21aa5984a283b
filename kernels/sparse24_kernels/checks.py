"""Checks of arguments that the public functions share. Every message has the value and what is allowed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .formats import mask_bytes

INPUTS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of inputs. Arithmetic is in fp32, of fp64 inputs in fp64; FP8 is rounded from fp32."""
RESULTS = (*INPUTS, torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes that a pruned weight may be written in."""


def check_dtype(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in INPUTS:
        raise ValueError(f"{name} takes fp64, fp32, bf16 and fp16, got {tensor.dtype}")


def check_pattern(n: int, m: int) -> None:
    if not 0 < n < m:
        raise ValueError(f"an n:m pattern keeps n of m with 0 < n < m, got {n}:{m}")


def check_dim(name: str, tensor: Tensor, dim: int) -> int:
    """`dim`, counted from the front."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"{name}: dim={dim} of a tensor of shape {tuple(tensor.shape)}")
    return dim % tensor.dim()


def check_groups(name: str, tensor: Tensor, m: int, dim: int) -> None:
    check_dtype(name, tensor)
    check_dim(name, tensor, dim)
    if tensor.shape[dim] % m:
        raise ValueError(f"{name}: dimension {dim} of shape {tuple(tensor.shape)} must be a multiple of {m}")


def check_mask(name: str, mask: Tensor, weight: Tensor) -> None:
    """A mask is bool of the weight's shape, or its packed bits."""
    bits = (*weight.shape[:-1], mask_bytes(weight.shape[-1])) if weight.dim() else None
    if (mask.dtype, tuple(mask.shape)) not in ((torch.bool, tuple(weight.shape)), (torch.uint8, bits)):
        raise ValueError(
            f"{name}: a mask for a weight of shape {tuple(weight.shape)} is bool of that shape or uint8 bits of shape "
            f"{bits}, got {mask.dtype} {tuple(mask.shape)}"
        )


def check_device(name: str, *tensors: Tensor | None) -> None:
    """All on one device: a kernel would read another device's address as one of its own."""
    devices = list(dict.fromkeys(tensor.device for tensor in tensors if tensor is not None))
    if len(devices) > 1:
        raise ValueError(f"{name}: tensors on different devices: {', '.join(map(str, devices))}")


def check_scalar(name: str, what: str, tensor: Tensor, like: Tensor) -> None:
    """A floating 0-d tensor, on the device of `like`."""
    if tensor.dim() or not tensor.is_floating_point():
        raise ValueError(f"{name}: {what} is a floating 0-d tensor, got {tensor.dtype} {tuple(tensor.shape)}")
    check_device(name, like, tensor)


def by_device(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Indices of the tensors on each device: a launch works on one device, a model may be on several."""
    indices: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        indices.setdefault(tensor.device, []).append(i)
    return list(indices.values())
