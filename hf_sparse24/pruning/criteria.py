"""The criteria of `oneshot`: each chooses a layer's mask, and the values that it starts from.

A new criterion is a function and an entry of `CRITERIA`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import sparse24_kernels as kernels
from sparse24_kernels import Pattern
from torch import Tensor

from . import layerwise
from .statistics import Gram, InputNorms


class Pruned(NamedTuple):
    """A pruned weight.

    Attributes:
        mask: bool `[out, in]`, N of every M inputs.
        values: `[out, in]`, zero where the mask is False.
        damping: that was needed.
    """

    mask: Tensor
    values: Tensor
    damping: float


class Criterion(NamedTuple):
    """How to prune one layer.

    Attributes:
        prune: takes the dense weight `[out, in]`, `statistics` of its inputs, the pattern and the damping.
        statistics: the least that it needs; it may get a `Gram` instead, which has all that `InputNorms` has.
    """

    prune: Callable[[Tensor, Any, Pattern, float], Pruned]
    statistics: type[Gram] | type[InputNorms] = InputNorms


def _magnitude(weight: Tensor, inputs: Gram | InputNorms, pattern: Pattern, damping: float) -> Pruned:
    return _masked(weight, kernels.nm_mask(weight, *pattern), damping)


def _wanda(weight: Tensor, inputs: Gram | InputNorms, pattern: Pattern, damping: float) -> Pruned:
    return _masked(weight, layerwise.wanda_mask(weight, inputs.squares, *pattern), damping)


def _masked(weight: Tensor, mask: Tensor, damping: float) -> Pruned:
    return Pruned(mask, kernels.apply_mask(weight, mask), damping)


def _sparsegpt(weight: Tensor, inputs: Gram, pattern: Pattern, damping: float) -> Pruned:
    values, mask, damping = layerwise.sparsegpt(weight, inputs.matrix[:-1, :-1], *pattern, damping)
    return Pruned(mask, values, damping)


CRITERIA = {
    "magnitude": Criterion(_magnitude),
    "wanda": Criterion(_wanda),
    "sparsegpt": Criterion(_sparsegpt, Gram),
}
