"""prune_layer: one linear layer's new weight and bias, by Options and a criterion, from statistics of its inputs."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from sparse24_kernels import Pattern, apply_mask, nm_mask, transposable_mask
from torch import Tensor, nn

from ..metrics import kept_magnitude
from ..packed_format import check_values
from ..progress import get_logger
from ..weights.packed_weight import not_packable
from ..weights.sparse_weight import SparseWeight
from ..weights.storage import WeightView
from . import layerwise
from .report import LayerReport
from .statistics import Gram, InputNorms, Statistics, matrix

logger = get_logger(__name__)

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
    calibrate_all_experts: bool = False

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


def prune_layer(
    view: WeightView, target: SparseWeight, inputs: Statistics, options: Options
) -> tuple[LayerReport, Tensor]:
    """Write a layer's or an expert's new weight and bias, and return its report and its mask in the stored layout."""
    weight, bias = matrix(view), None if target.is_stack else getattr(target.module, "bias", None)
    dense = weight.to(inputs.squares.dtype, copy=True)
    before = _with_bias(dense, bias)
    prune, solver = CRITERIA[options.criterion], getattr(target.method, "both_ways", None)
    values, mask, damping = prune(dense, inputs, target.pattern, options.damping, solver)
    if damping != options.damping:
        what = f"Gram matrix not positive definite with damping={options.damping}"
        logger.warning(f"{view.name}: {what}; used {damping:g}")
    after = _with_bias(values, bias)
    if options.reconstruct == "layer":
        assert isinstance(inputs, Gram)
        free = nn.functional.pad(mask, (0, 1), value=bias is not None)  # without a bias the last column stays zero
        # The bias may move as far as it helps. Weights of inputs that are never active stay as the criterion left them.
        penalty = layerwise.ridge(inputs.matrix[:-1, :-1], damping) * (inputs.matrix.diagonal() > 0).to(before)
        penalty[-1] = 0
        after = layerwise.least_squares(before, free, inputs.matrix, penalty, after)
    weight.copy_(apply_mask(after[:, :-1], mask))
    if options.values == "int8" and options.reconstruct != "block":
        round_layer(view, target, inputs, damping)
    if bias is not None:
        bias.copy_(after[:, -1])
    lost = dense * ~mask
    stored = _with_bias(weight.to(dense), bias)  # rounded to the layer's dtype
    scale = inputs.output_norm(_with_bias(dense)) or 1.0  # outputs that are all zero stay so
    report = LayerReport(
        name=view.name,
        tokens=inputs.tokens,
        masked_error=inputs.output_norm(_with_bias(lost)) / scale,
        error=inputs.output_norm(before - stored) / scale,
        kept_magnitude=kept_magnitude(dense, mask),
        dropped=int(lost.count_nonzero()),
        damping=damping,
        pattern=str(target.pattern),
    )
    return report, mask if target.input_dim == -1 else mask.t().contiguous()


def round_layer(view: WeightView, target: SparseWeight, inputs: Statistics, damping: float) -> None:
    """Round a pruned weight to int8 values, if it can be packed."""
    assert isinstance(inputs, Gram)
    if not not_packable(target):
        weight, gram = matrix(view), inputs.matrix[:-1, :-1]
        with torch.autocast(weight.device.type, enabled=False):
            wide = weight.to(gram.dtype, copy=True)
            weight.copy_(layerwise.round_to_int8(wide, gram, target.pattern, damping, weight.dtype))


def _with_bias(weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `[W, b]`, with zeros if `bias` is None."""
    return nn.functional.pad(weight, (0, 1)) if bias is None else torch.cat([weight, bias[:, None].to(weight)], 1)
