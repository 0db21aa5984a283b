"""What a sparsity method has to say. One instance serves a whole model; it holds no tensors."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import Sparse24Config


class SparseMethod(ABC):
    """Which weight the products see, and what a layer must remember for it.

    Every hook is a pure function. `weight` is a layer's dense master weight in the layer's own layout, `dim` the
    dimension of it that is the input dimension (groups of M lie along it), and `state` the layer's buffers by name.

    A method is one file beside this one, one line in `methods/__init__.py`, and one preset in `config.py`.
    """

    transposable = False
    """Whether the mask is N:M along the output dimension too, so that the grad_input product can be sparse."""

    needs_square_groups = False
    """Whether the output dimension, too, must be a multiple of M."""

    def __init__(self, config: Sparse24Config):
        self.config = config
        self.n, self.m = config.n, config.m

    def init_state(self, weight: Tensor, dim: int) -> dict[str, Tensor]:
        """The buffers a layer keeps, computed from its weight. Runs when sparsity begins, never inside forward."""
        return {}

    @abstractmethod
    def mask(self, weight: Tensor, dim: int, state: dict[str, Tensor], packed: bool) -> Tensor:
        """Which weights are kept now: bool, shape of `weight`, or its packed bits. Masked decay and metrics ask."""

    @abstractmethod
    def sparse_weight(
        self, weight: Tensor, dim: int, state: dict[str, Tensor], dtype: torch.dtype, forms: Sequence[str]
    ) -> tuple[Tensor, ...]:
        """The weight the products use, in `dtype`, N:M along `dim`, without -0.0: each of `forms`.

        `forms` are those of `kernels.prune_forms`. A method that prunes by a rule of its own gives it the result `x`,
        with `rule="mask"` and `mask=x != 0`.
        """
