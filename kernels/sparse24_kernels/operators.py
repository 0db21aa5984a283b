"""The table of operators that an implementation fills. Imports nothing of this package."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, dtype


@dataclass(frozen=True, kw_only=True)
class Operators:
    """The functions of one implementation; None where it lacks the operator. `reference` has all, and defines them."""

    nm_mask: Callable[[Tensor, int, int, int, bool], Tensor] | None = None
    transposable_mask: Callable[[Tensor, int, int, str, bool], Tensor] | None = None
    prune: (
        Callable[[Tensor, str, int, int, int, Tensor | None, Tensor | None, dtype, list[str]], list[Tensor]] | None
    ) = None
    s_ste_scale: Callable[[Tensor, int, int, int, str], Tensor] | None = None
    mvue: Callable[[Tensor, Tensor, int, int, int, str, str], Tensor] | None = None
    masked_decay_: Callable[[Tensor, Tensor, Tensor, float], None] | None = None
    gated_activation: Callable[[Tensor, Tensor, str], Tensor] | None = None
    gated_activation_backward: Callable[[Tensor, Tensor, Tensor, str], tuple[Tensor, Tensor]] | None = None
    unpack_nm: Callable[[Tensor, Tensor, Tensor | None, int], Tensor] | None = None
    packed_mm: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    packed_linear: Callable[[Tensor, Tensor, Tensor, Tensor | None, int, Tensor | None], Tensor] | None = None
