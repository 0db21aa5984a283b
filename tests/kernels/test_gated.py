"""Gated activations: values, gradients, memory layouts, precision."""

import pytest
import sparse24_kernels as kernels
import torch
from torch.nn import functional as F

EAGER = {
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "geglu-exact": lambda gate, up: F.gelu(gate) * up,
}
every_kind = pytest.mark.parametrize("kind", EAGER)


def column_major(x: torch.Tensor) -> torch.Tensor:
    """The same values column-major, as a transposed GEMM leaves them."""
    return x.flatten(0, -2).t().contiguous().t().view(x.shape)


@every_kind
def test_gradients(kind):
    gate, up = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda g, u: kernels.gated_activation(g, u, kind), (gate, up))
    assert torch.autograd.gradcheck(lambda g, u: kernels.gated_activation(g.t(), u.t(), kind), (gate, up))
    only_up = kernels.gated_activation(gate.detach(), up, kind)
    only_up.sum().backward()
    assert gate.grad is None
    torch.testing.assert_close(up.grad, EAGER[kind](gate, torch.ones_like(gate)).detach())


@every_kind
@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8)])
@pytest.mark.parametrize("gate_layout", ["row", "column"])
@pytest.mark.parametrize("up_layout", ["row", "column"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layout_follows_the_inputs(kind, shape, gate_layout, up_layout, dtype):
    gate, up = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    expected = EAGER[kind](gate.float(), up.float()).to(dtype)
    gate = column_major(gate) if gate_layout == "column" else gate
    up = column_major(up) if up_layout == "column" else up
    gate, up = gate.requires_grad_(), up.requires_grad_()
    out = kernels.gated_activation(gate, up, kind)
    assert out.stride() == gate.stride()
    assert (out.stride(-1) == 1) == (gate_layout == "row")
    torch.testing.assert_close(out, expected)
    grads = torch.autograd.grad(out, (gate, up), torch.randn(shape).to(dtype))
    assert [grad.stride() for grad in grads] == [gate.stride(), up.stride()]


@every_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(kind, dtype):
    gate, up, grad = ((3 * torch.randn(64, 64)).to(dtype) for _ in range(3))
    gate, up = gate.requires_grad_(), up.requires_grad_()
    wide_gate, wide_up = (x.detach().float().requires_grad_() for x in (gate, up))
    out, wide_out = kernels.gated_activation(gate, up, kind), EAGER[kind](wide_gate, wide_up)
    assert torch.equal(out, wide_out.to(dtype))
    grads = torch.autograd.grad(out, (gate, up), grad)
    for ours, wide in zip(grads, torch.autograd.grad(wide_out, (wide_gate, wide_up), grad.float())):
        assert torch.equal(ours, wide.to(dtype))


@every_kind
def test_autograd_keeps_the_two_inputs_alone(kind):
    gate, up = (torch.randn(4, 8, requires_grad=True) for _ in range(2))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        kernels.gated_activation(gate, up, kind)
    assert [x.data_ptr() for x in kept] == [gate.data_ptr(), up.data_ptr()]
