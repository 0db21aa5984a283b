"""Rules: how a weight becomes N:M, as data. A method returns one; the library makes it in the forms that GEMMs take."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sparse24_kernels as kernels
import torch
from sparse24_kernels import Pattern
from sparse24_kernels.gemm import GemmBackend
from sparse24_kernels.gemm.backend import DENSE, encode_one
from sparse24_kernels.prune import prune_forms
from torch import Tensor

from .gemms import PRUNED
from .storage import WeightView


@dataclass(frozen=True)
class Magnitude:
    """Keep the N largest magnitudes of every M; ties keep the lower index."""


@dataclass(frozen=True)
class SoftThreshold:
    """`scale * sign(w) max(|w| - t, 0)` with an fp32 0-d `scale`, t the (M - N)-th smallest magnitude of the group
    (S-STE, section 4)."""

    scale: Tensor


@dataclass(frozen=True)
class Mask:
    """Keep the weights where `mask` is True: bool `[rows, columns]`, or packed bits (`sparse24_kernels.pack_bits`)."""

    mask: Tensor


@dataclass(frozen=True)
class Values:
    """Multiply by these values, in the layout of `view.matrix`. Compressed forms leave out their zeros."""

    values: Tensor


Rule = Magnitude | SoftThreshold | Mask | Values


def encode(
    rule: Rule,
    view: WeightView,
    pattern: Pattern,
    dtype: torch.dtype,
    forms: Sequence[tuple[str, GemmBackend]] = (("dense", DENSE),),
) -> list[Tensor]:
    """The pruned weight in each form of `formats.FORMS`, as its backend stores it, by one pass over it. Never -0.0."""
    matrix, kind = view.matrix, "magnitude"
    arguments: dict[str, Any] = {}
    if isinstance(rule, SoftThreshold):
        kind, arguments = "soft-threshold", {"scale": rule.scale}
    elif isinstance(rule, Mask):
        kind, arguments = "mask", {"mask": rule.mask}
    elif isinstance(rule, Values):
        matrix, kind, arguments = rule.values, "mask", {"mask": rule.values != 0}
    wanted = list(dict.fromkeys(form for form, _ in forms))
    made = dict(zip(wanted, prune_forms(matrix, wanted, kind, *pattern, view.dim, dtype=dtype, **arguments)))
    return [encode_one(backend, made[form], form) for form, backend in forms]


def mask_of(rule: Rule, view: WeightView, pattern: Pattern, packed: bool) -> Tensor:
    """Which entries a rule keeps: bool in the shape of `view.matrix`, or its packed bits."""
    if isinstance(rule, Magnitude | SoftThreshold):
        return kernels.nm_mask(view.matrix, *pattern, view.dim, packed)
    mask = rule.values != 0 if isinstance(rule, Values) else rule.mask
    if mask.dtype == torch.bool:
        return kernels.pack_bits(mask) if packed else mask
    return mask if packed else kernels.unpack_bits(mask, view.matrix.shape[1])


# What to do about masks that AveragedModel(use_buffers=True) has averaged.
AVERAGED = "if its masks were averaged, call init_state() on each of hf_sparse24.sparse_weights(model).values()"


def method_mask(method: Any, view: WeightView, packed: bool) -> Tensor:
    """Which entries a method keeps: bool in the shape of `view.matrix`, or its packed bits."""
    if not method.overrides("mask"):
        return mask_of(method.prune(view), view, method.pattern, packed)
    mask = method.mask(view)
    return kernels.pack_bits(mask) if packed else mask


def check_rule(rule: Rule, view: WeightView, method: Any, operand: str, name: str) -> None:
    """Raise ValueError where an operand is not N:M that the method says is sparse in a GEMM."""
    if isinstance(rule, Magnitude | SoftThreshold):  # at most N of every M, whatever they are given
        return
    dims = [view.dim] if operand == PRUNED and method.gemms.output.sparse else []
    if method.transposable and operand == method.gemms.grad_input.weight:
        dims.append(1 - view.dim)
    if wrong := wrong_groups(mask_of(rule, view, method.pattern, packed=False), view, method.pattern, dims):
        way = f"{AVERAGED}; otherwise method {method.name!r} must keep fewer"
        raise ValueError(f"{name} is not {method.pattern}: it {wrong}; {way}")


def wrong_groups(
    mask: Tensor, view: WeightView, pattern: Pattern, dims: Sequence[int], exactly: bool = False
) -> str | None:
    """Where a mask keeps more than N of every M along one of `dims`, or not exactly N; None where nowhere."""
    for dim in dims:
        kept = mask.unflatten(dim, (-1, pattern.m)).sum(dim + 1)
        if bad := int(((kept != pattern.n) if exactly else (kept > pattern.n)).sum()):
            allowed = f"{'exactly' if exactly else 'at most'} {pattern.n} of every {pattern.m}"
            along = "input" if dim == view.dim else "output"
            return f"does not keep {allowed} along the {along} dimension in {bad} groups"
    return None
