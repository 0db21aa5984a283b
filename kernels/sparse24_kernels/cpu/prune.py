"""Pruning by the kernels for CPUs, of fp64 by the reference. Also what its neighbours share."""

import math

import torch
from torch import Tensor

from .. import reference
from ..formats import mask_bytes
from .library import DTYPES, loaded

_PRUNING = ("magnitude", "soft-threshold", "mask", "bits")
_RULES = (*_PRUNING, "nm-mask", "mvue", "transposable", "pack-bits", "decay", "decay-bits", "pack")
"""By their number in native/problem.h."""

LARGEST_M = 64


def prune(
    weight: Tensor,
    rule: str,
    n: int,
    m: int,
    dim: int,
    mask: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype,
    forms: list[str],
) -> list[Tensor]:
    """The pruned weight in each of `forms`."""
    if dtype not in DTYPES or m > LARGEST_M:
        return reference.prune.prune(weight, rule, n, m, dim, mask, scale, dtype, forms)
    dense = weight.new_empty(weight.shape, dtype=dtype)
    if mask is None:
        run(rule, weight, dense, dim, n, m, scale=1.0 if scale is None else float(scale))
    else:
        run("mask" if mask.dtype == torch.bool else "bits", weight, dense, mask=mask)
    copied = torch.contiguous_format
    return [dense if form == "dense" else dense.t().clone(memory_format=copied) for form in forms]


def run(
    rule: str,
    x: Tensor,
    to: Tensor,
    dim: int | None = None,
    n: int = 2,
    m: int = 4,
    mask: Tensor | None = None,
    scale: float = 1.0,
    key: int = 0,
) -> None:
    """Write into a contiguous tensor what a rule of native/prune.cpp makes of x.

    `dim` is what groups run along; None for a rule that takes x as rows of its last dimension. ValueError: tensors with
    which the kernels would read what is not theirs; public functions refuse them first.
    """
    masks = [(torch.bool, x.shape), (torch.uint8, (*x.shape[:-1], mask_bytes(x.shape[-1] if x.dim() else 1)))]
    fits = (n, m) == (2, 4) or (0 < n < m <= LARGEST_M and dim is not None and not x.shape[dim] % m)
    fits &= mask is None or (mask.is_cpu and (mask.dtype, mask.shape) in masks)
    if not (fits and x.is_cpu and (x.dtype == torch.bool if rule == "pack-bits" else x.dtype in DTYPES)):
        raise ValueError(f"{rule}: {x.dtype} {tuple(x.shape)} on {x.device}, or its mask, is nothing that a CPU prunes")
    x, mask = x.contiguous(), None if mask is None else mask.contiguous()
    shape = x.shape or (1,)
    dim = len(shape) - 1 if dim is None else dim % len(shape)
    loaded().call(
        "sparse24_prune",
        _RULES.index(rule),
        x.data_ptr(),
        None if mask is None else mask.data_ptr(),
        to.data_ptr(),
        math.prod(shape[:dim]),
        shape[dim],
        math.prod(shape[dim + 1 :]),
        DTYPES.get(x.dtype, 0),  # bools have none
        DTYPES.get(to.dtype, 0),
        n,
        m,
        scale,
        key,
    )
