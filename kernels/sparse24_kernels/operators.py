"""The table of operators that an implementation fills, and how torch gets them. Imports nothing of this package."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor


class Pruning(NamedTuple):
    """How a weight becomes N:M, and what is made of it.

    Attributes:
        rule: `"magnitude"`, `"mask"` or `"soft-threshold"`.
        n, m, dim: of the groups. A mask has none.
        mask: of the rule `"mask"`: bool, or packed bits along the last dimension.
        scale: of the rule `"soft-threshold"`, a floating 0-d tensor; None for 1.
        dtype: of the results.
        forms: of `formats.FORMS`, a result for each.
    """

    rule: str
    n: int = 2
    m: int = 4
    dim: int = -1
    mask: Tensor | None = None
    scale: Tensor | None = None
    dtype: torch.dtype = torch.float32
    forms: Sequence[str] = ("dense",)


@dataclass(frozen=True, kw_only=True)
class Operators:
    """The functions of one implementation; None where it lacks the operator. `reference` has all, and defines them."""

    nm_mask: Callable[[Tensor, int, int, int, bool], Tensor] | None = None
    transposable_mask: Callable[[Tensor, int, int, str, bool], Tensor] | None = None
    prune: Callable[[Tensor, Pruning], list[Tensor]] | None = None
    mvue: Callable[[Tensor, Tensor, int, int, int, str, str], Tensor] | None = None
    masked_decay_: Callable[[Tensor, Tensor, Tensor, float], None] | None = None
    gated_activation: Callable[[Tensor, Tensor, str], Tensor] | None = None
    gated_activation_backward: Callable[[Tensor, Tensor, Tensor, str], tuple[Tensor, Tensor]] | None = None
    unpack_nm: Callable[[Tensor, Tensor, Tensor | None, int], Tensor] | None = None
    packed_mm: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    packed_linear: Callable[[Tensor, Tensor, Tensor, Tensor | None, int, Tensor | None], Tensor] | None = None


def register(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that makes a function an operator of torch, which computes `fake` of tensors without data. It has no
    derivative: call it without gradients, or by `not_differentiable`.

    Not by `custom_op`: it takes 7 us more in every call, as long as a small kernel.
    """

    def operator(function: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
        torch.library.impl(name, "CompositeExplicitAutograd", function)
        torch.library.register_fake(name, fake)
        return cast(Callable[..., Any], attrgetter(f"{name.replace('::', '.')}.default")(torch.ops))

    return operator


def not_differentiable(operator: Callable[..., Any], *arguments: Any) -> Any:
    """Call an operator of `register` with tensors that may require gradients: backward raises RuntimeError, where torch
    would lose them with a warning."""
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments):
        return _NotDifferentiable.apply(operator, *arguments)
    return operator(*arguments)


class _NotDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, operator, *arguments):
        ctx.operator = operator
        result = operator(*arguments)
        return tuple(result) if isinstance(result, list) else result

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError(f"{ctx.operator} is not differentiable")
