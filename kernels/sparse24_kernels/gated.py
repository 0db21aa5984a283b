"""Gated activations, the middle of a gated MLP, as one differentiable operation."""

from typing import Any

import torch
from torch import Tensor

from .checks import check_device, check_floating, check_one_of, described
from .dispatch import implementation

GATED_ACTIVATIONS = ("swiglu", "geglu", "geglu-exact")
"""Names of the gated activations: by SiLU, by the tanh approximation of GELU, and by GELU itself."""


def gated_activation(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """`act(gate) * up`, the middle of a gated MLP, as one differentiable operation.

    Args:
        gate: what the activation function is applied to; any shape and strides, fp64, fp32, bf16 or fp16.
        up: what its result is multiplied by; same shape and dtype, any strides.
        kind: `"swiglu"` (SiLU), `"geglu"` (GELU, tanh approximation) or `"geglu-exact"` (GELU by erf).

    Returns:
        Shape, dtype and memory layout of `gate`; row-major in is row-major out, column-major in is column-major out; an
        input with gaps (half of a projection) gives a result without gaps. Computed in fp32, fp64 in fp64, and
        rounded once. Each gradient has the layout of its input. Differentiable once, in reverse mode.

    Raises:
        ValueError: another `kind`, a dtype that is not floating, or shapes, dtypes or devices that differ.

    Reference: Shazeer 2020 (arXiv 2002.05202) for the functions; Hu et al. 2024 (arXiv 2404.01847) for keeping the
    memory layout, which their code does for "geglu" only.

    Examples:
        >>> gated_activation(torch.tensor([1.0, -1.0]), torch.tensor([2.0, 2.0]), "swiglu")
        tensor([ 1.4621, -0.5379])
    """
    check_one_of(GATED_ACTIVATIONS, kind=kind)
    check_floating("gated_activation", gate=gate, up=up)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gated_activation: gate and up must be alike, got {described(gate)} and {described(up)}")
    check_device("gated_activation", gate, up)
    return _gated_activation(gate, up, kind)


@torch.library.custom_op("sparse24::gated_activation", mutates_args=())
def _gated_activation(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    return implementation("gated_activation", gate)(gate, up, kind)


@torch.library.custom_op("sparse24::gated_activation_backward", mutates_args=())
def _gated_activation_backward(grad: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return implementation("gated_activation_backward", gate)(grad, gate, up, kind)


_gated_activation.register_fake(lambda gate, up, kind: torch.empty_like(gate))
_gated_activation_backward.register_fake(lambda grad, gate, up, kind: (torch.empty_like(gate), torch.empty_like(up)))


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.kind = inputs
    ctx.save_for_backward(gate, up)  # nothing else: backward recomputes the activation


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_gated_activation_backward(grad, *ctx.saved_tensors, ctx.kind), None


_gated_activation.register_autograd(_backward, setup_context=_save_inputs)
