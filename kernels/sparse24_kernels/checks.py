"""What the public functions check and sort before they run."""

from collections.abc import Sequence

import torch
from torch import Tensor

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_pattern(n: int, m: int) -> None:
    if not 0 < n < m:
        raise ValueError(f"an n:m pattern keeps n of m with 0 < n < m, got {n}:{m}")


def check_groups(name: str, tensor: Tensor, m: int, dim: int) -> None:
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"{name} takes fp64, fp32, bf16 and fp16, got {tensor.dtype}")
    if tensor.shape[dim] % m:
        raise ValueError(f"{name}: dimension {dim} of shape {tuple(tensor.shape)} must be a multiple of {m}")


def check_mask(name: str, mask: Tensor, weight: Tensor) -> None:
    """A mask is bool of the weight's shape, or its packed bits."""
    shape = weight.shape if mask.dtype == torch.bool else (*weight.shape[:-1], -(-weight.shape[-1] // 8))
    if mask.dtype not in (torch.bool, torch.uint8) or mask.shape != shape:
        raise ValueError(
            f"{name}: a mask for a weight of shape {tuple(weight.shape)} is bool of that shape or uint8 bits of shape "
            f"{(*weight.shape[:-1], -(-weight.shape[-1] // 8))}, got {mask.dtype} {tuple(mask.shape)}"
        )


def by_device(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Indices of the tensors on each device: a launch works on one, a model may lie on several."""
    indices: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        indices.setdefault(tensor.device, []).append(i)
    return list(indices.values())
