"""Block: one block of a model while `oneshot` prunes it, and BlockExample: one of its calls."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..weights.sparse_weight import SparseWeight
from .replay import Call, tensors
from .report import LayerReport
from .statistics import Statistics


class BlockExample(NamedTuple):
    """A call of a block with the inputs of the pruned model, the dense model's output there, and which tokens count."""

    call: Call
    target: Tensor
    counts: Tensor | None

    def error(self) -> Tensor:
        """The squared error of the output relative to the target's square, for each token that counts: `[tokens]`."""
        output, target = tensors(self.call.compute().output)[0].float(), self.target.float()
        if self.counts is not None:
            output, target = output[self.counts], target[self.counts]
        size = target.square().sum(-1)
        # A token that the dense model sets to almost nothing must not outweigh all others.
        least = (0.1 * size.median()).clamp(min=torch.finfo().tiny) if len(size) else size
        return ((output - target).square().sum(-1) / size.clamp(min=least)).flatten()


@dataclass
class Block:
    """A block of the model by its name in `Replay.blocks`, with its weights to prune by theirs.

    Calibration gives `statistics` of each weight's inputs, and `examples` to reconstruct the block. Pruning adds the
    `masks` of weights that no earlier block has, in the layout of the stored weights, a report of each in `layers`, and
    the `errors` before and after reconstruction.
    """

    name: str
    module: nn.Module
    weights: dict[str, SparseWeight] = field(default_factory=dict)
    statistics: dict[str, Statistics] = field(default_factory=dict)
    examples: list[BlockExample] = field(default_factory=list)
    masks: dict[str, Tensor] = field(default_factory=dict)
    layers: list[LayerReport] = field(default_factory=list)
    errors: tuple[float, float] | None = None
