"""Arguments of the kernels' operators at the sizes of real models: what benchmarks time.

`sparse24_kernels.hard_problems` has the small problems by which kernels are checked, and compares results at any size.
"""

from typing import Any

import sparse24_kernels as kernels
import torch
from sparse24_kernels import reference
from sparse24_kernels.operators import Pruning
from torch import Tensor

DTYPES = FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MVUE_KINDS = ((2, 4, "exact"), (2, 4, "approx"), (1, 2, "exact"))
Shape = tuple[int, ...]


def draw(device: torch.device, shape: Shape, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    """The same Gaussian values each time, made in their dtype, because benchmarks draw a billion."""
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed + sum(shape) + len(shape))
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)


def on_weight(device: torch.device, shape: Shape, dtype: torch.dtype, *settings: Any) -> tuple:
    """Of `nm_mask` and `transposable_mask`."""
    return draw(device, shape, dtype), 2, 4, *settings


def prune(device: torch.device, shape: Shape, dtype: torch.dtype, how: Pruning) -> tuple:
    """A mask is transposable."""
    weight = draw(device, shape, dtype)
    if how.rule == "mask":
        how = how._replace(mask=kernels.transposable_mask(weight, packed=True))
    elif how.rule == "soft-threshold":
        how = how._replace(scale=torch.full((), 1.483, device=device))
    return weight, how


def packed_matrix(device: torch.device, shape: Shape, dtype: torch.dtype, scale: float = 1.0) -> tuple:
    weight = draw(device, shape) * scale
    return *reference.packed.pack_nm(weight.to(dtype), 2, 4), None, 4


def packed_linear(device: torch.device, shape: Shape, dtype: torch.dtype, tokens: int) -> tuple:
    """Tokens of a layer whose weight is packed; the sums of their products have a variance of 1."""
    return draw(device, (tokens, shape[1]), dtype), *packed_matrix(device, shape, dtype, shape[1] ** -0.5), None


def mvue(
    device: torch.device, shape: Shape, dtype: torch.dtype, n: int, m: int, estimator: str, dim: int, form: str
) -> tuple:
    key = torch.full((), 2**40 + 12345, device=device, dtype=torch.int64)
    return draw(device, shape, dtype), key, n, m, dim, estimator, form


def gated(
    device: torch.device, shape: Shape, dtype: torch.dtype, count: int, kind: str, is_column_major: bool = False
) -> tuple:
    """The last `count` of grad, gate and up."""
    grad, gate, up = draw(device, (3, *shape))
    found = [x.to(dtype) for x in (grad, 3 * gate, up)][-count:]
    return *(x.t().contiguous().t() if is_column_major else x for x in found), kind
