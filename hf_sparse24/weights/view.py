"""What a method is shown of a weight, and what a weight needs of its method and its config: types alone."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from sparse24_kernels import Pattern
from torch import Tensor

from .encodings import Forms, RunState
from .gemms import Gemms


class WeightView(NamedTuple):
    """What a method computes with: a weight, or one matrix of a stack, without gradients, and the state that belongs
    to it.

    Attributes:
        matrix: `[rows, columns]`, the dense master weight as it is stored: `[out, in]`, or `[in, out]` in GPT-2's
            `Conv1D`. Without gradients, and never to be written to.
        dim: the dimension of `matrix` that is the input dimension, 0 or 1. Groups of M lie along it.
        state: what the method remembers of this weight, by name.
    """

    matrix: Tensor
    dim: int
    state: dict[str, Tensor]


class WeightMethod(Protocol):
    """What the layers need of a method; `methods.SparseMethod` has it."""

    @property
    def name(self) -> str: ...
    @property
    def gemms(self) -> Gemms: ...
    @property
    def pattern(self) -> Pattern: ...
    @property
    def mask_is_local(self) -> bool: ...

    def init_state(self, view: WeightView) -> dict[str, Tensor]: ...
    def init_parameters(self, view: WeightView) -> dict[str, Tensor]: ...
    def adopt_mask(self, view: WeightView, mask: Tensor) -> dict[str, Tensor]: ...
    def state_of_pruned(self, view: WeightView) -> dict[str, Tensor]: ...
    def check_state(self, view: WeightView) -> str | None: ...
    def mask(self, view: WeightView, packed: bool) -> Tensor: ...
    def prune(self, view: WeightView, operand: str, forms: Forms, dtype: torch.dtype) -> Sequence[Tensor]: ...
    def merged(self, weight: Any) -> Tensor: ...
    def adapt_output(self, weight: Any, x: Tensor, output: Tensor) -> Tensor: ...


class WeightConfig(Protocol):
    """What all sparse weights of a model share; a `Sparse24Config` that a model is patched with has it."""

    backend: str
    run_state: RunState

    @property
    def bound_method(self) -> Any: ...
