"""What training hooks of a method are told: the step, and the pieces of weights that a process updates."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..weights.sparse_weight import SparseWeight

DENSE_PHASE = "dense"
"""The phase in which a model computes with its master weights."""


@dataclass(frozen=True)
class StepContext:
    """Where training stands.

    Attributes:
        step: optimizer steps done.
        total_steps: optimizer steps of the whole run.
        phase: how the model computes now.
        optimizer: the optimizer itself, never a wrapper.
        weights: the sparse weights by name: `.parameters` are the tensors of `init_parameters`, `.state` the buffers of
            `init_state`. With FSDP2 and tensor parallelism both may be DTensors; `whole` gathers one.
    """

    step: int
    total_steps: int
    phase: str
    optimizer: torch.optim.Optimizer
    weights: Mapping[str, SparseWeight] = field(repr=False)

    @property
    def is_dense(self) -> bool:
        """Whether the model computes with its dense master weights."""
        return self.phase == DENSE_PHASE


@dataclass(frozen=True)
class Piece:
    """What this process updates of a weight that has a gradient: all of it, its rows by FSDP2, or its share of a
    flat group of DeepSpeed ZeRO. All tensors have one shape.

    Attributes:
        name: of the weight.
        values: of the dense master weight. May be changed in place.
        gradient: clipped and unscaled, as the optimizer will use it. Changed in place.
        learning_rate: what the optimizer uses now.
    """

    name: str
    values: Tensor
    gradient: Tensor
    learning_rate: float
    make_mask: Callable[[], Tensor] = field(repr=False)

    @property
    def mask(self) -> Tensor:
        """Which entries the method keeps: bool, or packed bits as every function of `sparse24_kernels` takes them."""
        return self.make_mask()
