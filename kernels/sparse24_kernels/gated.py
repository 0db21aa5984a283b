"""Gated activations, the middle of a gated MLP, as one differentiable operation."""

import torch
from torch import Tensor

from .backends import implementation
from .checks import check_device, check_dtype

GATED_ACTIVATIONS = ("swiglu", "geglu", "geglu-exact")


def gated_activation(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """`act(gate) * up`, the middle of a gated MLP, as one differentiable operation.

    Args:
        gate, up: same shape and floating dtype, any strides.
        kind: `"swiglu"` (SiLU), `"geglu"` (GELU, tanh approximation) or `"geglu-exact"` (GELU by erf).

    Returns:
        Shape, dtype and memory layout of `gate`: row-major in, row-major out; column-major in, column-major out; what
        has gaps (half of a projection) comes out without. fp16 and bf16 are computed in fp32 and rounded once. Each
        gradient has the layout of what it is the gradient of. Differentiable once, in reverse mode.

    Raises:
        ValueError: another `kind`, a dtype that is not floating, or shapes, dtypes or devices that differ.

    Reference: Shazeer 2020 (arXiv 2002.05202) for the functions; Hu et al. 2024 (arXiv 2404.01847) for following the
    layout, in their code for "geglu" alone.
    """
    if kind not in GATED_ACTIVATIONS:
        raise ValueError(f"kind={kind!r}: must be one of {list(GATED_ACTIVATIONS)}")
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gated_activation needs gate and up alike, got {tuple(gate.shape)} {gate.dtype} and "
            f"{tuple(up.shape)} {up.dtype}"
        )
    check_dtype("gated_activation", gate)
    check_device("gated_activation", gate, up)
    return _gated_activation(gate, up, kind)


@torch.library.custom_op("sparse24::gated_activation", mutates_args=())
def _gated_activation(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    return implementation(gate).gated.gated_activation(gate, up, kind)


@torch.library.custom_op("sparse24::gated_activation_backward", mutates_args=())
def _gated_activation_backward(grad: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return implementation(gate).gated.gated_activation_backward(grad, gate, up, kind)


@_gated_activation.register_fake
def _(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    return torch.empty_like(gate)


@_gated_activation_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up)


def _save_inputs(ctx, inputs, output) -> None:
    gate, up, ctx.kind = inputs
    ctx.save_for_backward(gate, up)  # nothing else: the activation is computed again


def _backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_gated_activation_backward(grad, *ctx.saved_tensors, ctx.kind), None


_gated_activation.register_autograd(_backward, setup_context=_save_inputs)
