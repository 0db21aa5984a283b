"""Options: the arguments of `oneshot` that say how to prune, checked; CRITERIA: how each criterion prunes a layer."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from sparse24_kernels import Pattern, apply_mask, nm_mask, transposable_mask
from torch import Tensor

from ..config import Sparse24Config
from ..methods import ONESHOT_METHOD, method_class
from ..packed_format import check_values
from ..patching.masters import check_dense_master
from ..weights.sharding import check_whole
from ..weights.sparse_weight import SparseWeight
from ..weights.storage import layer_name
from . import layerwise
from .statistics import Gram, InputNorms, Statistics

Pruned = tuple[Tensor, Tensor, float]
"""The pruned weight `[out, in]`, zero off the mask; its bool mask, N of every M inputs; the damping that it took."""


def _magnitude(weight: Tensor, inputs: Statistics, pattern: Pattern, damping: float, solver: str | None) -> Pruned:
    mask = nm_mask(weight, *pattern) if solver is None else transposable_mask(weight, *pattern, solver)
    return apply_mask(weight, mask), mask, damping


def _wanda(weight: Tensor, inputs: Statistics, pattern: Pattern, damping: float, solver: str | None) -> Pruned:
    """The n of every m inputs with the largest `|W_ij| * ||X_j||_2`: Sun et al. 2023 (arXiv 2306.11695), eq. (1)."""
    mask = layerwise.best_mask(weight.abs() * inputs.squares.sqrt(), *pattern, -1, solver)
    return apply_mask(weight, mask), mask, damping


def _sparsegpt(weight: Tensor, inputs: Gram, pattern: Pattern, damping: float, solver: str | None) -> Pruned:
    return layerwise.sparsegpt(weight, inputs.matrix[:-1, :-1], *pattern, damping, solver=solver)


CRITERIA: dict[str, Callable[..., Pruned]] = {"magnitude": _magnitude, "wanda": _wanda, "sparsegpt": _sparsegpt}
"""Functions that prune one layer, by the statistics of its inputs. `solver` is that of `KeptMaskMethod.both_ways`."""
RECONSTRUCTIONS = ("block", "layer", None)


@dataclass(frozen=True)
class Options:
    """The arguments of `oneshot` of these names, checked."""

    criterion: str
    reconstruct: str | None
    passes: int
    learning_rate: float
    damping: float
    values: str

    def __post_init__(self):
        check_values(self.values)
        for name, allowed in (("criterion", tuple(CRITERIA)), ("reconstruct", RECONSTRUCTIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {list(allowed)}")
        if not (isinstance(self.passes, int) and self.passes >= 1):
            raise ValueError(f"passes={self.passes!r}: must be an int of at least 1; reconstruct=None trains nothing")
        if not (isinstance(self.learning_rate, int | float) and 0 < self.learning_rate < 1):
            raise ValueError(f"learning_rate={self.learning_rate!r}: must be between 0 and 1")
        if not (isinstance(self.damping, int | float) and 0 <= self.damping < math.inf):
            raise ValueError(f"damping={self.damping!r}: must be a finite number >= 0")

    @property
    def statistics(self) -> type[Gram] | type[InputNorms]:
        """The statistics to keep of a layer's inputs. A Gram matrix costs as much as running the block."""
        needs_gram = self.criterion == "sparsegpt" or self.reconstruct == "layer" or self.values == "int8"
        return Gram if needs_gram else InputNorms


def check_config(config: Sparse24Config) -> None:
    """Raise ValueError unless a config's method keeps the masks that `oneshot` chooses."""
    if not isinstance(config, Sparse24Config):
        raise ValueError(f"config={config!r}: must be a Sparse24Config or None")
    if not method_class(config.method).overrides("adopt_mask"):
        raise ValueError(f"method={config.method!r}: does not keep oneshot's masks; {ONESHOT_METHOD!r} does")
    way = "afterwards call patch_model(unpatch_model(model), config) with it, which keeps the zeros"
    check_dense_master(config, f"oneshot prunes dense weights; leave it out, and {way}")
    if getattr(config, "dense_start", 0):
        raise ValueError(f"dense_start={config.dense_start!r}: other masks would be chosen after it; leave it at 0")


def check_weights(weights: dict[str, SparseWeight]) -> None:
    """Raise ValueError unless the weights are there and whole, and none is a stack of experts."""
    stacks = [name for name, weight in weights.items() if weight.is_stack]
    if stacks:
        names = sorted({".".join(name.split(".")[-2:]) for name in stacks})
        raise ValueError(f"{stacks[0]} is a stack of experts, which oneshot cannot prune: exclude_modules={names}")
    for name, weight in weights.items():
        check_whole(name, weight.master)
        if weight.parameter.is_meta:
            raise ValueError(f"{layer_name(name)} has no weight yet (meta device): load the model onto a device first")
