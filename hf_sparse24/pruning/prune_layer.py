"""prune_layer: one linear layer's new weight and bias, from statistics of its inputs."""

import torch
from sparse24_kernels import apply_mask
from torch import Tensor, nn

from ..metrics import kept_magnitude
from ..progress import get_logger
from ..weights.packed_weight import not_packable
from ..weights.sparse_weight import SparseWeight
from ..weights.storage import layer_name
from . import layerwise
from .options import CRITERIA, Options
from .report import LayerReport
from .statistics import Gram, Statistics, matrix

logger = get_logger(__name__)


def prune_layer(name: str, target: SparseWeight, inputs: Statistics, options: Options) -> tuple[LayerReport, Tensor]:
    """Write a layer's new weight and bias, and return its report and its mask in the layout of the stored weight."""
    weight, bias = matrix(target), getattr(target.module, "bias", None)
    dense = weight.to(inputs.squares.dtype, copy=True)
    before = _with_bias(dense, bias)
    prune, solver = CRITERIA[options.criterion], getattr(target.method, "both_ways", None)
    values, mask, damping = prune(dense, inputs, target.pattern, options.damping, solver)
    if damping != options.damping:
        what = f"Gram matrix not positive definite with damping={options.damping}"
        logger.warning(f"{layer_name(name)}: {what}; used {damping:g}")
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
        round_layer(target, inputs, damping)
    if bias is not None:
        bias.copy_(after[:, -1])
    lost = dense * ~mask
    stored = _with_bias(weight.to(dense), bias)  # rounded to the layer's dtype
    scale = inputs.output_norm(_with_bias(dense)) or 1.0  # outputs that are all zero stay so
    report = LayerReport(
        name=layer_name(name),
        tokens=inputs.tokens,
        masked_error=inputs.output_norm(_with_bias(lost)) / scale,
        error=inputs.output_norm(before - stored) / scale,
        kept_magnitude=kept_magnitude(dense, mask),
        dropped=int(lost.count_nonzero()),
        damping=damping,
        pattern=str(target.pattern),
    )
    return report, mask if target.input_dim == -1 else mask.t().contiguous()


def round_layer(target: SparseWeight, inputs: Statistics, damping: float) -> None:
    """Round a pruned weight to int8 values, if it can be packed."""
    assert isinstance(inputs, Gram)
    if not not_packable(target):
        weight, gram = matrix(target), inputs.matrix[:-1, :-1]
        with torch.autocast(weight.device.type, enabled=False):
            wide = weight.to(gram.dtype, copy=True)
            weight.copy_(layerwise.round_to_int8(wide, gram, target.pattern, damping, weight.dtype))


def _with_bias(weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `[W, b]`, with zeros if `bias` is None."""
    return nn.functional.pad(weight, (0, 1)) if bias is None else torch.cat([weight, bias[:, None].to(weight)], 1)
