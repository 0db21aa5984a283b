"""The table of operators that an implementation fills. Imports nothing of this package."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
