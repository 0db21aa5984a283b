"""Stacked experts: mixture-of-experts models keep the weights of all experts of a block in one 3-D Parameter.

Transformers computes with them in many ways. So a weight becomes sparse here, not a layer: while the module's forward
runs, the Parameter's name gives the pruned weight, whatever code reads it; elsewhere (optimizers, `state_dict`) the
dense master. Each expert's matrix is pruned as it would be alone, or unpacked at the start of a forward.

All GEMMs are dense math on pruned values: no library has a sparse grouped GEMM. Gradients are exact, also where the
method prunes them at random: without a kernel that only adds noise. What changes a GEMM rather than its weight (pruned
activations, FP8, another weight in grad_input) cannot be done: experts then stay dense, and the report says so.

Known limit: kernels of the Hub (`use_kernels=True`) read the Parameters from outside, and compute with dense weights.
"""

from functools import partial
from typing import Any

import torch
from sparse24_kernels.prune import mask_gradient
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..weights.encodings import Wanted
from ..weights.gemms import MASK, PRUNED
from ..weights.sparse_weight import SparseWeight
from .sparse_module import Made, PackedModule, SparseModule, reject_tracing


class StackedExperts(Made, nn.Module):
    """The base of sparse and packed experts, which become a subclass of their class with the same forward. `running`
    has the weights that the Parameters' names give, one entry for each forward of a thread; all are equal."""

    sparse24: dict[str, SparseWeight]
    running: list[dict[str, Tensor]]

    @classmethod
    def members(cls, key: tuple[str, ...]) -> dict[str, Any]:
        return {name: property(partial(cls.read, name=name)) for name in key}

    def read(self, name: str) -> Tensor:
        """The value of the attribute `name`."""
        weight, running = self.__dict__["sparse24"][name], self.__dict__["running"]
        if running:
            return running[-1][name]
        return weight.parameter if weight.storage.has_zeros else weight.storage.whole()

    def forward_with(self, weights: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        self.running.append(weights)
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.running.pop()


class SparseExperts(StackedExperts, SparseModule):
    """Stacked experts with sparse weights."""

    prefix = "Sparse24"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        weights = self.sparse24.values()
        run = next(iter(weights)).run
        if run.is_dense:
            return super().forward(*args, **kwargs)
        reject_tracing()
        trains = self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if trains and any(weight.parameter.requires_grad for weight in weights):
            run.expect_controller()
        pruned = {}
        for weight in weights:
            parameter, mask = weight.parameter, None
            (out_in,) = weight.encoded([Wanted(PRUNED)], parameter.dtype)
            if weight.method.keeps_zeros and parameter.requires_grad and torch.is_grad_enabled():
                (mask,) = weight.encoded([Wanted(MASK)], parameter.dtype)
            pruned[weight.name] = _StraightThrough.apply(parameter, weight.storage.out_in(out_in), mask)
        return self.forward_with(pruned, *args, **kwargs)


class _StraightThrough(torch.autograd.Function):
    """The pruned weight that stands for a master, whose gradient is the master's, or that of `mask * master`."""

    @staticmethod
    def forward(ctx, master: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        ctx.save_for_backward(mask)
        return torch.ops.aten._unsafe_view(value, value.shape)  # the same memory, and no view that autograd guards

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (mask,) = ctx.saved_tensors
        return grad if mask is None else mask_gradient(grad, mask), None, None


class PackedExperts(StackedExperts, PackedModule):
    """Stacked experts with packed weights."""

    prefix = "Packed"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        reject_tracing()
        weights = {name: weight.storage.whole() for name, weight in self.sparse24.items()}
        return self.forward_with(weights, *args, **kwargs)
