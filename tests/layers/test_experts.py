"""Stacked experts, the 3-D Parameters of mixture-of-experts models: what they compute, and when they are pruned."""

import copy
import threading

import pytest
import torch
import zoo
from expert_models import EVERY_METHOD, EXPERTS, OF_LAYERS, patched
from method_runs import every_method, loop, method_config, run_steps
from sparse_models import count_prunings, logits
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hf_sparse24 import Sparse24Config, patch_model, sparse_weights, unpatch_model
from hf_sparse24.metrics import is_nm_sparse
from hf_sparse24.run import set_phase


def emulated(model: PreTrainedModel) -> PreTrainedModel:
    """The dense model whose Parameters are the pruned weights: the same GEMMs, and the same gradients."""
    return unpatch_model(copy.deepcopy(model))


def assert_same_step(model: nn.Module, other: nn.Module) -> None:
    """One forward and backward pass, bit for bit."""
    losses = [m(**zoo.batch()).loss for m in (model, other)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    theirs = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        ours, expected = parameter.grad, theirs[name].grad
        weight = sparse_weights(model).get(name)
        if weight is not None and weight.method.keeps_zeros:
            expected = expected * weight.mask()
        assert (ours is None) == (expected is None) and (ours is None or torch.equal(ours, expected)), name


# What is computed.


@pytest.mark.parametrize(
    ("name", "method"), [*EVERY_METHOD, *((name, "s-ste") for name in zoo.MOE if name != "gpt_oss")]
)
def test_loss_and_gradients_are_those_of_the_pruned_weights(name, method):
    model = patched(name, method)
    weights = sparse_weights(model)
    assert weights and all(weight.is_stack for weight in weights.values())
    for weight in weights.values():
        pruned = weight.pruned()
        assert is_nm_sparse(pruned, dim=weight.input_dim) and not torch.signbit(pruned[pruned == 0]).any()
        assert not is_nm_sparse(weight.parameter, dim=weight.input_dim)
    assert_same_step(model, emulated(model))
    assert all(weight.parameter.grad.any() for weight in weights.values())


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_every_implementation_of_experts_computes_with_pruned_weights(implementation):
    reference = patched("gpt_oss")
    reference.set_experts_implementation("eager")
    model = patched("gpt_oss")
    model.set_experts_implementation(implementation)
    other = emulated(model)
    assert other.config._experts_implementation == implementation
    assert_same_step(model, other)
    torch.testing.assert_close(logits(model), logits(reference))


@every_method
def test_every_method_trains_experts_or_says_why_not(method):
    model = zoo.build("mixtral")
    report = patch_model(model, method_config(method))
    if method in OF_LAYERS:
        assert "multiplies by another weight" in report.skipped[f"{EXPERTS}.gate_up_proj"]
        return
    optimizer, controller = loop(model)
    before = model(**zoo.batch()).loss.item()
    run_steps(model, optimizer, controller, 8)
    assert model(**zoo.batch()).loss.item() < before
    assert f"{EXPERTS}.gate_up_proj" in controller.layer_flip_rates()


def test_the_dense_phase_computes_with_the_parameters():
    model = zoo.build("mixtral")
    before = logits(model)
    patch_model(model, Sparse24Config(target_modules="gate_up_proj"))
    assert not torch.equal(logits(model), before)
    set_phase(model, "dense")
    assert torch.equal(logits(model), before)


def test_autocast_prunes_in_the_masters_precision():
    model = patched("gpt_oss", "t-sr-ste")
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_step(model, emulated(model))
    assert all(weight.parameter.grad.dtype == torch.float32 for weight in sparse_weights(model).values())


def test_a_block_that_is_checkpointed_by_hand_reads_the_same_weight_again():
    block = patched("mixtral").model.layers[0].mlp
    x = torch.randn(1, 5, 32, requires_grad=True)
    checkpoint(block, x, use_reentrant=False).sum().backward()
    recomputed, block.experts.gate_up_proj.grad = block.experts.gate_up_proj.grad, None
    block(x).sum().backward()
    assert torch.equal(block.experts.gate_up_proj.grad, recomputed)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own, after breaks
@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])  # the former breaks the graph within the forward
@pytest.mark.slow
def test_compiled(implementation):
    model = patched("mixtral")
    model.set_experts_implementation(implementation)
    block, x = model.model.layers[0].mlp, torch.randn(1, 5, 32)
    output = block(x)
    output.sum().backward()
    expected = block.experts.down_proj.grad.clone()
    model.zero_grad()
    compiled = torch.compile(block, backend="eager", fullgraph=implementation != "eager")
    torch.testing.assert_close(compiled(x), output)
    compiled(x).sum().backward()
    torch.testing.assert_close(block.experts.down_proj.grad, expected)


# When it is pruned, and who sees what.


def test_a_forward_prunes_once_however_many_experts_read(monkeypatch):
    model = patched("mixtral")
    model.set_experts_implementation("eager")
    calls = count_prunings(monkeypatch)
    for _ in range(2):
        model(**zoo.batch()).loss.backward()
    assert [weight.name for weight in calls] == [
        "gate_up_proj",
        "down_proj",
    ] * 4  # two layers, two passes: nothing is kept without a controller
    calls.clear()
    logits(model)
    logits(model)
    assert len(calls) == 4
    optimizer, controller = loop(model.train())
    for weight in sparse_weights(model).values():
        weight.clear_encodings()
    calls.clear()
    run_steps(model, optimizer, controller, 2)  # of two micro-batches each
    assert len(calls) == 2 * 4


def test_outside_of_its_forward_the_name_is_the_parameter():
    model = patched()
    experts = model.get_submodule(EXPERTS)
    names = [name for name, _ in experts.named_parameters()]
    assert names == ["gate_up_proj", "down_proj"]
    assert model.get_parameter(f"{EXPERTS}.gate_up_proj") is experts.gate_up_proj is experts._parameters["gate_up_proj"]
    seen = []
    experts.act_fn.register_forward_hook(lambda *_: seen.append(experts.gate_up_proj))
    model.set_experts_implementation("eager")
    logits(model)
    assert seen and all(is_nm_sparse(weight) for weight in seen)
    experts.act_fn.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model)
    assert isinstance(experts.gate_up_proj, nn.Parameter)
    experts.gate_up_proj = nn.Parameter(torch.zeros_like(experts.gate_up_proj))
    assert not experts._parameters["gate_up_proj"].any()


def test_threads_that_share_a_model_do_not_disturb_each_other():
    model = patched("mixtral")
    model.set_experts_implementation("eager")
    experts, x = model.model.layers[0].mlp.experts, torch.randn(4, 32)
    routing = torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.5)
    expected = experts(x, *routing)

    def run_in_another_thread(*_) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        with torch.no_grad():
            thread = threading.Thread(target=lambda: experts(x, *routing))
            thread.start()
            thread.join()

    experts.act_fn.register_forward_hook(run_in_another_thread)
    output = experts(x, *routing)
    assert torch.equal(output, expected)
    output.sum().backward()
    assert experts.down_proj.grad is not None and isinstance(experts.down_proj, nn.Parameter)
