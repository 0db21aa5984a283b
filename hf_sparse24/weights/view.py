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
    """

    matrix: Tensor
    dim: int
    state: dict[str, Tensor]
