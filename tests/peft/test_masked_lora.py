"""LoRA through the mask: what it computes, and what it needs."""

import pytest
import torch
from lora_models import adapted, around, logits, patched
from sparse_models import Largest
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from hf_sparse24.metrics import is_nm_sparse
from hf_sparse24.peft import masked

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # PEFT asks for it
    pytest.mark.filterwarnings("ignore:Already following adapters were merged"),
    pytest.mark.filterwarnings("ignore:Adapter second was active which is now deleted"),
]


def layers(dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    """A linear layer and a Conv1D of the same sizes, [out, in] = [12, 8], 2:4."""
    linear, conv = nn.Linear(8, 12, bias=False, dtype=dtype), Conv1D(12, 8).to(dtype)
    mask = torch.tensor([1, 0, 0, 1, 0, 1, 1, 0])
    with torch.no_grad():
        linear.weight.mul_(mask)
        conv.weight.copy_(linear.weight.t())
    return [linear, conv]


@pytest.mark.parametrize("chunk", [1, 30, 1000])
@pytest.mark.parametrize("layer", layers(), ids=["Linear", "Conv1D"])
def test_output_and_gradients_are_those_of_the_masked_update(layer, chunk, monkeypatch):
    monkeypatch.setattr(masked, "CHUNK", chunk)
    x, a, b = (torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in [(2, 3, 8), (4, 8), (12, 4)])
    weight = masked.out_in(layer, layer.weight.detach())
    expected = x @ ((weight != 0) * (0.5 * b @ a)).t()
    found = masked.masked_linear(x, a, b, 0.5, layer)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, [x, a, b], grad), torch.autograd.grad(expected, [x, a, b], grad)
    )


@pytest.mark.parametrize("needed", ["x", "a", "b"])
def test_gradients_that_nobody_needs_are_left_out(needed):
    tensors = {"x": torch.randn(3, 8), "a": torch.randn(4, 8), "b": torch.randn(12, 4)}
    tensors[needed].requires_grad_()
    masked.masked_linear(*tensors.values(), 1.0, layers(torch.float32)[0]).sum().backward()
    assert [name for name, tensor in tensors.items() if tensor.grad is not None] == [needed]


def test_neither_the_update_nor_its_gradient_is_ever_whole(monkeypatch):
    monkeypatch.setattr(masked, "CHUNK", 1024)
    layer = nn.Linear(64, 64)
    x, a, b = torch.randn(4, 64, requires_grad=True), torch.randn(4, 64, requires_grad=True), torch.randn(64, 4)
    with Largest() as largest:
        masked.masked_linear(x, a, b.requires_grad_(), 1.0, layer).sum().backward()
    assert 512 < largest.elements <= 1024 < layer.weight.numel()


def test_a_small_update_of_a_bf16_weight_is_not_rounded_away():
    model = adapted(dtype=torch.bfloat16)
    (adapter, *_) = around(model)
    with torch.no_grad():
        adapter.lora_B["default"].weight.mul_(1e-4)
        weight, delta = adapter.base_layer.sparse_weight(), adapter.get_delta_weight("default")
        assert ((weight + delta).bfloat16() == weight)[weight != 0].float().mean() > 0.5
        x = torch.randn(64, 32, dtype=torch.bfloat16)
        change = adapter.lora_variant["default"].forward(adapter, "default", x, torch.zeros(64, 64).bfloat16())
        expected = x.float() @ (delta * (weight != 0)).t()
    torch.testing.assert_close(change.float(), expected, rtol=0.02, atol=0.02 * float(expected.std()))


def test_dropout_drops_what_the_adapter_sees_and_not_what_the_base_layer_sees():
    model = adapted(lora_dropout=0.5).train()
    (adapter, *_) = around(model)
    x, layer, a, b = torch.randn(5, 32), adapter.base_layer, adapter.lora_A["default"], adapter.lora_B["default"]
    weight = layer.sparse_weight()
    update = (weight != 0) * (4 * b.weight @ a.weight)
    torch.manual_seed(3)
    found = adapter(x)
    torch.manual_seed(3)
    dropped = torch.nn.functional.dropout(x, 0.5)
    torch.testing.assert_close(found, x @ weight.t() + dropped @ update.t())


def test_autocast_multiplies_in_its_dtype_and_keeps_the_mask():
    model = adapted()
    (adapter, *_) = around(model)
    x = torch.randn(2, 3, 32)
    with torch.autocast("cpu", torch.bfloat16):
        found = adapter(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), adapter(x), atol=0.05, rtol=0.05)


def test_gradient_checkpointing_gives_the_same_gradients():
    (adapter, *_) = around(adapted(lora_dropout=0.5).train())
    x = torch.randn(5, 32, requires_grad=True)
    inputs = [x, *(p for p in adapter.parameters() if p.requires_grad)]
    torch.manual_seed(2)
    expected = torch.autograd.grad(adapter(x).square().sum(), inputs)
    torch.manual_seed(2)
    found = torch.autograd.grad(checkpoint(adapter, x, use_reentrant=False).square().sum(), inputs)
    assert all(map(torch.equal, found, expected))


@pytest.mark.slow
def test_the_compiled_layer_computes_the_same():
    (adapter, *_) = around(adapted())
    x = torch.randn(3, 32)
    torch.testing.assert_close(torch.compile(adapter, backend="eager", fullgraph=True)(x), adapter(x))


@pytest.mark.parametrize("init", ["pissa", "olora", "orthogonal", "mica"])
def test_an_initialisation_from_the_weights_keeps_outputs_and_zeros(init):
    expected = logits(patched())
    model = adapted(init_lora_weights=init)
    torch.testing.assert_close(logits(model), expected)
    takes_part = "pissa" in init or init == "olora"
    assert all((a.base_layer.weight == 0).float().mean() == (0.5 if takes_part else 0) for a in around(model))
    model.merge_adapter()
    torch.testing.assert_close(logits(model), expected)
    assert all(is_nm_sparse(adapter.base_layer.weight, 2, 4) for adapter in around(model))
