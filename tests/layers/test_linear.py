"""The three GEMMs: what each method multiplies, and the gradient rule, in float64."""

import pytest
import sparse24_kernels as kernels
import torch
from sparse24_kernels.fp8 import fp8_simulate
from sparse_models import sparse_layer
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_sparse24 import Sparse24Config
from hf_sparse24.methods import METHODS, GemmSettings
from hf_sparse24.run import SparseRun, set_phase
from hf_sparse24.weights.encodings import Wanted

METHOD_NAMES = sorted(name for name, method in METHODS.items() if method.__module__.startswith("hf_sparse24."))
WITH_GEMM_SETTINGS = [name for name in METHOD_NAMES if issubclass(METHODS[name].Settings, GemmSettings)]
GRADIENTS = [("mvue", 2, 4, "exact"), ("mvue-approx", 2, 4, "approx"), ("mvue-1:2", 1, 2, "exact")]


def make_layer(method: str, conv1d: bool = False, bias: bool = True, dtype=torch.float64, **arguments):
    run = SparseRun(Sparse24Config(method=method, **arguments))
    if conv1d:
        dense = Conv1D(12, 8).to(dtype)
        nn.init.normal_(dense.weight)
        return sparse_layer(dense, run)
    return sparse_layer(nn.Linear(8, 12, bias=bias, dtype=dtype), run)


def fix_draws(layer: nn.Module, key: int) -> None:
    """Let MVUE draw the same samples in every backward pass."""
    layer.sparse24["weight"].rng_key = torch.tensor(key)


def test_sparse_weight_of_each_method():
    weight = torch.tensor([[4.0, -1, 3, 2]] * 4)

    def sparse(method):
        linear = nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            linear.weight.copy_(weight)
        return sparse_layer(linear, SparseRun(Sparse24Config(method=method)))

    for method in ("ste", "sr-ste"):
        assert sparse(method).sparse_weight()[0].tolist() == [4, 0, 3, 0]
    layer = sparse("s-ste")
    # S(w) = [2, 0, 1, 0]; beta = <w, S> / ||S||^2 = (8 + 3) / 5
    assert layer.scale.item() == pytest.approx(2.2)
    assert layer.sparse_weight()[0].tolist() == pytest.approx([4.4, 0, 2.2, 0])
    # Four equal rows: every pattern must drop half of each column, the first of the equals does so top-down.
    layer = sparse("t-sr-ste")
    assert layer.mask_bits.shape == (4, 1)
    mask = layer.sparse24["weight"].mask().int()
    assert mask.sum(0).tolist() == mask.sum(1).tolist() == [2, 2, 2, 2]


def input_weight(layer) -> torch.Tensor:
    """The weight of the grad_input GEMM, `[out, in]`."""
    weight = layer.sparse24["weight"]
    (operand,) = weight.encoded([Wanted(weight.method.gemms.grad_input.weight)], layer.weight.dtype)
    return operand


def weight_gradient(layer, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of a layer's master, dZ^T X `[out, in]`: all of it, or the part that the mask keeps."""
    weight = layer.sparse24["weight"]
    gradient = weight.storage.out_in(gradient)
    return gradient * weight.mask() if weight.method.keeps_zeros else gradient


@pytest.mark.parametrize("weight_grad", ["dense", "mvue"])
@pytest.mark.parametrize("conv1d", [False, True])
@pytest.mark.parametrize("method", WITH_GEMM_SETTINGS)
def test_gradient_rule(method, conv1d, weight_grad):
    """dX uses the sparse weight's values, dW is dZ^T X, by MVUE along tokens if it is asked for, passed straight
    through unless the method keeps zeros, dBias the plain sum."""
    layer = make_layer(method, conv1d, weight_grad=weight_grad)
    fix_draws(layer, 5)
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)  # 10 tokens: not a multiple of four
    grad = torch.randn(2, 5, 12, dtype=torch.float64)
    sparse = layer.sparse_weight().t() if conv1d else layer.sparse_weight()  # [out, in]
    out = layer(x)
    torch.testing.assert_close(out, x @ sparse.t() + layer.bias)
    out.backward(grad)
    torch.testing.assert_close(x.grad, grad @ input_weight(layer))
    rows = grad.flatten(0, 1)
    pruned = rows if weight_grad == "dense" else kernels.mvue(rows, dim=0, key=torch.tensor(5))
    torch.testing.assert_close(layer.weight.grad, weight_gradient(layer, pruned.t() @ x.detach().flatten(0, 1)))
    torch.testing.assert_close(layer.bias.grad, grad.sum((0, 1)))


@pytest.mark.parametrize("conv1d", [False, True])
def test_a_fixed_mask_has_the_gradient_of_mask_times_weight(conv1d):
    layer = make_layer("fixed-mask", conv1d)
    x = torch.randn(5, 8, dtype=torch.float64)
    plain = layer.weight.detach().clone().requires_grad_()
    masked = plain * layer.sparse24["weight"].mask()
    (x @ (masked if conv1d else masked.t())).square().sum().backward()
    (layer(x) - layer.bias).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, plain.grad)
    with torch.no_grad():  # where a kept weight is zero, it still trains
        layer.weight.zero_()
    layer.weight.grad = None
    layer(x).sum().backward()
    assert layer.weight.grad[layer.sparse24["weight"].mask()].all()


@pytest.mark.parametrize(("kind", "n", "m", "estimator"), GRADIENTS)
def test_every_gradient_estimate_in_both_gemms(kind, n, m, estimator):
    layer = make_layer("s-ste", weight_grad=kind, input_grad=kind)
    fix_draws(layer, 5)
    x = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(8, 12, dtype=torch.float64)
    layer(x).backward(grad)
    along_tokens = kernels.mvue(grad, n, m, 0, estimator, key=torch.tensor(5))
    along_features = kernels.mvue(grad, n, m, -1, estimator, key=torch.tensor(6))
    torch.testing.assert_close(layer.weight.grad, along_tokens.t() @ x)
    torch.testing.assert_close(x.grad, along_features @ layer.sparse_weight())


def test_pruned_activations():
    """The output and the weight gradient see the pruned activations; their gradient passes straight through."""
    layer = make_layer("ste", activations="2:4")
    x = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    pruned = kernels.apply_mask(x.detach(), kernels.nm_mask(x))
    out = layer(x)
    torch.testing.assert_close(out, pruned @ layer.sparse_weight().t() + layer.bias)
    out.sum().backward()
    torch.testing.assert_close(layer.weight.grad, torch.ones(12, 8, dtype=torch.float64) * pruned.sum(0))
    torch.testing.assert_close(x.grad, layer.sparse_weight().sum(0).expand(8, 8))


@pytest.mark.parametrize("weight_grad", ["dense", "mvue"])
@pytest.mark.parametrize("method", WITH_GEMM_SETTINGS)
def test_fp8_rounds_the_operands_of_every_gemm(method, weight_grad):
    layer = make_layer(method, fp8=True, weight_grad=weight_grad, dtype=torch.float32)
    fix_draws(layer, 5)
    x, grad = torch.randn(8, 8, requires_grad=True), torch.randn(8, 12)
    sparse = layer.sparse_weight()

    e4m3, e5m2 = (lambda t, f=f: fp8_simulate(t.detach(), f) for f in ("e4m3", "e5m2"))
    out = layer(x)
    torch.testing.assert_close(out, e4m3(x) @ e4m3(sparse).t() + layer.bias)
    out.backward(grad)
    pruned = kernels.mvue(grad, dim=0, key=torch.tensor(5)) if weight_grad == "mvue" else grad
    torch.testing.assert_close(x.grad, e5m2(grad) @ e5m2(input_weight(layer)))
    torch.testing.assert_close(layer.weight.grad, weight_gradient(layer, e5m2(pruned).t() @ e5m2(x)))
    torch.testing.assert_close(layer.bias.grad, grad.sum(0))


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_autograd_agrees_with_finite_differences_in_x(method):
    layer = make_layer(method)
    gemms = layer.sparse24["weight"].method.gemms
    if gemms.grad_input.weight != gemms.output.weight:
        return  # by design, dX is not the gradient of what forward computes
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, x)


def test_a_second_derivative_is_refused():
    layer = make_layer("ste")
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


@pytest.mark.parametrize("conv1d", [False, True])
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_dense_phase_is_the_dense_layer(method, conv1d):
    layer = make_layer(method, conv1d, dtype=torch.float32)
    set_phase(layer, "dense")
    x = torch.randn(4, 8)
    weight = layer.weight.t() if conv1d else layer.weight
    torch.testing.assert_close(layer(x), nn.functional.linear(x, weight, layer.bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_autocast_prunes_the_master_and_multiplies_in_low_precision(method, dtype):
    layer = make_layer(method, dtype=torch.float32)
    # Two weights that only fp32 can tell apart: a mask from the cast weight would keep the first by the tie rule.
    with torch.no_grad():
        layer.weight[:, :4] = torch.tensor([1.0, 1.0 + 2**-20, 3.0, 0.5])
    weight = layer.sparse24["weight"]
    weight.init_state()
    if method in ("ste", "sr-ste"):
        assert weight.mask()[:, :4].int().tolist() == [[0, 1, 1, 0]] * 12
    x = torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", dtype):
        out = layer(x)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out, nn.functional.linear(x.to(dtype), layer.sparse_weight().to(dtype), layer.bias.to(dtype))
    )
    out.float().sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casting_a_layer_keeps_the_scale_exact(dtype):
    layer = make_layer("s-ste", dtype=torch.float32)
    scale = layer.scale.item()
    layer.to(dtype)
    assert layer.weight.dtype == dtype and layer.scale.dtype == torch.float32 and layer.scale.item() == scale
    assert layer(torch.randn(2, 8, dtype=dtype)).dtype == dtype
    layer.to(torch.float32).to("meta")
    assert layer.scale.is_meta


@pytest.mark.parametrize("shape", [(8,), (0, 8), (1, 8), (3, 1, 7, 8)])
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_input_shapes(method, shape):
    layer = make_layer(method, bias=False)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    out = layer(x)
    assert out.shape == (*shape[:-1], 12)
    out.sum().backward()
    assert x.grad.shape == shape and layer.weight.grad.shape == layer.weight.shape


def test_repr():
    assert "Sparse24Linear(in=8, out=12, bias=True, method=s-ste, phase=sparse)" in repr(make_layer("s-ste"))
    assert "Sparse24Conv1D(in=8, out=12, bias=True, method=ste, phase=sparse)" in repr(make_layer("ste", conv1d=True))
