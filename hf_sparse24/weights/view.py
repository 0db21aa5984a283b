"""What a method is shown of a weight, and what a weight needs of its run: types alone."""

from typing import Any, NamedTuple, Protocol

from sparse24_kernels import Pattern
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


class WeightRun(Protocol):
    """What all sparse weights of a model share while it trains; `run.SparseRun` has it."""

    method: Any  # a `methods.SparseMethod`

    @property
    def phase(self) -> str: ...
    @property
    def is_dense(self) -> bool: ...
    @property
    def backend(self) -> str: ...
    @property
    def open_step(self) -> object | None: ...
    @property
    def progress(self) -> tuple[int, int]: ...

    def method_of(self, pattern: Pattern) -> Any: ...
    def expect_controller(self) -> None: ...
