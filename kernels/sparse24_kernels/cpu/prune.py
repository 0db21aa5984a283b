"""Pruning, masks, MVUE and masked decay by the kernels for CPUs; what these lack, such as fp64, by the reference."""

import math
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..formats import FORMS, OPERAND_MULTIPLE, empty_mask, form_shape, mask_bytes
from ..operators import Pruning
from .library import DTYPES, addresses, loaded
from .memory import reused_memory

_PRUNING = ("magnitude", "soft-threshold", "mask", "bits")
_RULES = (*_PRUNING, "nm-mask", "mvue", "transposable", "pack-bits", "decay", "decay-bits")
"""By their number in native/problem.h."""

LARGEST_M = 64


def prune(weight: Tensor, how: Pruning) -> list[Tensor]:
    """The pruned weight in each form."""
    rule, n, m, dim, mask, scale, dtype, forms = how
    if dtype not in DTYPES or m > LARGEST_M:
        return reference.prune.prune(weight, how)
    if mask is not None:  # it has no groups
        rule, n, m, dim = "mask" if mask.dtype == torch.bool else "bits", 2, 4, weight.dim() - 1
    factor = 1.0 if scale is None else float(scale)
    at_once = [form for form in forms if "packed" in form and (n, m) == (2, 4)]
    made = {form: packed(weight, rule, form, mask=mask, scale=factor) for form in at_once}
    if len(made) < len(forms):
        dense = reused_memory(weight.shape, dtype)
        run(rule, weight, dense, dim, n, m, mask, factor)
        made |= {form: in_form(dense, form) for form in forms if form not in made}
    return [made[form] for form in forms]


def nm_mask(weight: Tensor, n: int, m: int, dim: int, packed: bool) -> Tensor:
    """Keep the n largest magnitudes of each group of m: bool, same shape as `weight`, or its packed bits."""
    if m > LARGEST_M:
        return reference.masks.nm_mask(weight, n, m, dim, packed)
    return _mask("nm-mask", weight, packed, dim, n, m)


def transposable_mask(weight: Tensor, n: int, m: int, solver: str, packed: bool) -> Tensor:
    """The best of the 90 patterns for each 4 x 4 tile of `[R, C]`, the first of equal ones as the reference has it."""
    return _mask("transposable", weight, packed)


def _mask(rule: str, weight: Tensor, packed: bool, dim: int | None = None, n: int = 2, m: int = 4) -> Tensor:
    """The mask of a rule: bool, same shape as `weight`, or its packed bits."""
    mask = empty_mask(weight, packed=False)
    run(rule, weight, mask, dim, n, m)
    if not packed:
        return mask
    bits = empty_mask(mask, packed=True)
    run("pack-bits", mask, bits)
    return bits


def mvue(x: Tensor, key: Tensor, n: int, m: int, dim: int, estimator: str, form: str) -> Tensor:
    """Draw the estimate of `x` that `key` determines, in one of `FORMS`; `dim` is not negative."""
    if (n, m, estimator) != (2, 4, "exact"):
        return in_form(reference.mvue.mvue(x, key, n, m, dim, estimator, "dense"), form)
    if "packed" in form:
        return packed(x, "mvue", form, key=int(key))
    estimate = reused_memory(x.shape, x.dtype)
    run("mvue", x, estimate, dim, key=int(key))
    return in_form(estimate, form)


def masked_decay_(grad: Tensor, weight: Tensor, mask: Tensor, alpha: float) -> None:
    """grad += alpha * (1 - mask) * weight, in place."""
    # The kernel, in fp32 and with fused multiply-add, writes what PyTorch would.
    fits = grad.dtype == weight.dtype == torch.float32 and grad.shape == weight.shape and grad.is_contiguous()
    if not fits or not abs(alpha) <= torch.finfo(torch.float32).max or loaded().path == "portable":
        return reference.masks.masked_decay_(grad, weight, mask, alpha)
    run("decay" if mask.dtype == torch.bool else "decay-bits", weight, grad, mask=mask, scale=alpha)


def packed(x: Tensor, rule: str, form: str, **arguments: Any) -> Tensor:
    """A matrix in a packed form, as a rule makes it; the other arguments are those of `run`."""
    made = reused_memory(form_shape(form, x.shape), torch.float32)
    run(rule, x, made, FORMS[form], is_packed=True, **arguments)
    return made


def in_form(pruned: Tensor, form: str) -> Tensor:
    """A pruned tensor in a form, where no kernel makes it from what is pruned."""
    return packed(pruned, "magnitude", form) if "packed" in form else reference.packed.in_form(pruned, form)


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
    is_packed: bool = False,
) -> None:
    """Write into a contiguous tensor what a rule of native/prune.cpp makes of x.

    `dim` is what groups run along; None for a rule that takes x as rows of its last dimension. ValueError: tensors with
    which the kernels would read what is not theirs; public functions refuse them first.
    """
    masks = [(torch.bool, x.shape), (torch.uint8, (*x.shape[:-1], mask_bytes(x.shape[-1] if x.dim() else 1)))]
    fits = (n, m) == (2, 4) or (0 < n < m <= LARGEST_M and dim is not None and not x.shape[dim] % m)
    fits &= not is_packed or (x.dim() == 2 and dim is not None and not x.shape[dim] % OPERAND_MULTIPLE)
    fits &= mask is None or (mask.is_cpu and (mask.dtype, mask.shape) in masks)
    if not (fits and x.is_cpu and (x.dtype == torch.bool if rule == "pack-bits" else x.dtype in DTYPES)):
        raise ValueError(f"{rule}: {x.dtype} {tuple(x.shape)} on {x.device}, or its mask, is nothing that a CPU prunes")
    x, mask = x.contiguous(), None if mask is None else mask.contiguous()
    shape = x.shape or (1,)
    dim = len(shape) - 1 if dim is None else dim % len(shape)
    sizes = (math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :]))
    dtypes = (DTYPES.get(x.dtype, 0), DTYPES.get(to.dtype, 0))  # bools have none
    given = (_RULES.index(rule), *addresses(x, mask, to), *sizes, *dtypes)
    loaded().call("sparse24_prune", *given, n, m, scale, key, is_packed)
