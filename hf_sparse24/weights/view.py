"""What a method is shown of a weight."""

from typing import NamedTuple

from torch import Tensor


class WeightView(NamedTuple):
    """A weight, or one matrix of a stack, without gradients, and the state that belongs to it.

    Attributes:
        matrix: `[rows, columns]`, the dense master weight as it is stored: `[out, in]`, or `[in, out]` in GPT-2's
            `Conv1D`. Without gradients, and never to be written to.
        dim: the dimension of `matrix` that is the input dimension, 0 or 1. Groups of M lie along it.
        state: what the method remembers of this weight, by name.
        layer, number: the layer, and which matrix of a stack; see `name`.
    """

    matrix: Tensor
    dim: int
    state: dict[str, Tensor]
    layer: str = ""
    number: int | None = None

    # Not a field: torch.compile would make another graph for each name.
    @property
    def name(self) -> str:
        """The layer's name in the model that was patched, to seed random numbers by: `model.layers.0.mlp.up_proj`, of
        a stack `...experts.up_proj[3]`, of a shared weight the first layer's. Packed masters have none."""
        return self.layer if self.number is None else f"{self.layer}[{self.number}]"
