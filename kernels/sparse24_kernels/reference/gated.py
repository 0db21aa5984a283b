"""Gated activations `act(gate) * up` and their gradients.

Half precision is computed in fp32 and rounded once. Every result has the memory layout of the tensor it belongs to:
sparse GEMMs have column-major outputs, and reading those row by row costs several times the arithmetic.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .prune import wide

_ops = torch.ops.aten
# kind -> the activation, and its gradient from (gradient of its output, its input).
ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "swiglu": (_ops.silu, _ops.silu_backward),
    "geglu": (partial(_ops.gelu, approximate="tanh"), partial(_ops.gelu_backward, approximate="tanh")),
    "geglu-exact": (_ops.gelu, _ops.gelu_backward),
}


def gated_activation(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """act(gate) * up, laid out as `gate`."""
    activation, _ = ACTIVATIONS[kind]
    return torch.mul(activation(wide(gate)), wide(up), out=torch.empty_like(gate))


def gated_activation_backward(grad: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The gradients of `gate` and `up`, laid out as they are: grad * up * act'(gate) and grad * act(gate)."""
    activation, activation_backward = ACTIVATIONS[kind]
    wide_grad, wide_gate = wide(grad), wide(gate)
    grad_gate = torch.empty_like(gate).copy_(activation_backward(wide_grad * wide(up), wide_gate))
    grad_up = torch.mul(wide_grad, activation(wide_gate), out=torch.empty_like(up))
    return grad_gate, grad_up
