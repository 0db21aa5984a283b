"""The controller follows its optimizer, and counts the steps that the optimizer takes."""

import pytest
import torch
import zoo
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from transformers.optimization import Adafactor

from hf_sparse24 import Sparse24Config, Sparse24Controller, patch_model, unpatch_model


def mlp(method: str = "sr-ste", **settings) -> nn.ModuleList:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(8, 8, bias=False)])
    patch_model(model, Sparse24Config(method=method, target_modules="all-linear", **settings))
    return model


def gradients(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def pruned_part(model: nn.ModuleList) -> torch.Tensor:
    return (model[0].weight * ~model[0].sparse24["weight"].mask()).detach()


def test_accumulated_micro_batches_are_no_steps():
    """accelerate's optimizer does nothing when `step` is called while gradients accumulate."""
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method="t-sr-ste", mask_interval=2))
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    controller = Sparse24Controller(model, optimizer, total_steps=12)
    phases = []
    for batch in range(48):
        with accelerator.accumulate(model):
            accelerator.backward(model(**zoo.batch(batch)).loss)
            optimizer.step()
            optimizer.zero_grad()
            controller.after_micro_step()
        phases.append(controller.phase)
    assert controller.step == 12
    assert phases.index("dense") == 4 * 10 - 1  # the last sixth, not the last sixth of micro-batches


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("decay_on", ["gradient", "weight"])
def test_under_a_grad_scaler(fused, unscales, decay_on):
    """Decay goes to unscaled gradients; a step with overflowed ones changes nothing and is not counted."""
    model = mlp(masked_decay=0.5, decay_on=decay_on)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    controller = Sparse24Controller(model, optimizer, total_steps=4)
    scaler.scale(torch.zeros(()))  # makes the scale
    for value, steps in ((float("inf"), 0), (512.0, 1)):
        before, decayed = model[0].weight.detach().clone(), 0.5 * pruned_part(model)
        gradients(model, value)
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update(1024.0)
        expected = before - 0.1 * (0.5 + decayed) if steps else before
        torch.testing.assert_close(model[0].weight.detach(), expected)
        assert controller.step == steps


class OwnAdamW(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, OwnAdamW])  # torch calls hooks in a class and in its base
@pytest.mark.parametrize("arguments", ["none", "args", "kwargs"])
def test_gradients_are_decayed_once_where_a_closure_makes_them_too(cls, arguments):
    """Lightning runs forward and backward within `step`."""
    models = mlp(masked_decay=0.5), mlp(masked_decay=0.5)
    for model in models:
        optimizer = (cls if model is models[1] else torch.optim.AdamW)(model.parameters(), lr=0.1)
        controller = Sparse24Controller(model, optimizer, total_steps=2)

        def closure(model=model):
            gradients(model, 0.01)
            return 7.0

        for _ in range(2):
            if arguments == "none" or model is models[0]:
                closure()
                optimizer.step()
            else:
                loss = optimizer.step(closure) if arguments == "args" else optimizer.step(closure=closure)
                assert loss == 7.0
        assert controller.step == 2
    assert torch.equal(models[0][0].weight, models[1][0].weight)


def adafactor(parameters) -> torch.optim.Optimizer:
    return Adafactor(parameters, lr=0.1, relative_step=False)  # it counts in an int


@pytest.mark.parametrize("make", [torch.optim.AdamW, adafactor, torch.optim.SGD])
@pytest.mark.parametrize("given", ["nothing", "the optimizer", "step=", "both states"])
def test_a_controller_that_has_counted_fewer_steps_than_its_optimizer_warns_once(make, given, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("hf_sparse24.training.optimizers.logger.warning", said.append)
    states: list[dict] = []
    for _ in range(2):
        model = mlp()
        optimizer = make(model.parameters())
        if make is torch.optim.AdamW:
            get_optimizer_state_dict(model, optimizer)  # takes an empty step
        controller = Sparse24Controller(model, optimizer, total_steps=9, step=4 if states and given == "step=" else 0)
        if states and given != "nothing":
            optimizer.load_state_dict(states[0])
        if states and given == "both states":  # in the order that the docs say
            controller.load_state_dict(states[1])
        for _ in range(4):
            gradients(model, 1.0)
            optimizer.step()
        assert states or not said
        states = [optimizer.state_dict(), controller.state_dict()]
    warns = given == "the optimizer" and make is not torch.optim.SGD  # which counts nothing
    assert len(said) == warns and all("as step=, or the" in text and "load_state_dict" in text for text in said)


class Chained(torch.optim.Optimizer):
    def __init__(self, *optimizers, has_hooks):
        self.optimizers, self.param_groups = optimizers, [x for each in optimizers for x in each.param_groups]
        if has_hooks:
            super().__init__(self.param_groups, {})

    def step(self, closure=None):
        return [each.step() for each in self.optimizers]


def test_several_optimizers_are_refused_with_the_way_out_and_one_of_them_is_followed():
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(3)])
    patch_model(model, Sparse24Config(method="sr-ste", target_modules="all-linear", masked_decay=0.5))
    muon = torch.optim.Muon(model[:2].parameters(), lr=0.0, weight_decay=0.0)
    adamw = torch.optim.AdamW(model[2].parameters(), lr=0.0)
    for optimizer, reason in (
        (muon, "does not hold 2.weight, .* follows one optimizer, and this one holds other sparse weights"),
        (adamw, "does not hold 0.weight, .* a controller follows one optimizer"),
        (torch.optim.SGD(nn.Linear(8, 8).parameters()), "does not hold 0.weight, .*, or pass the one that holds it"),
        ([muon, adamw], "optimizer=list: must be a torch.optim.Optimizer, .* of several, such as Muon and AdamW, make"),
        (Chained(muon, adamw, has_hooks=False), r"optimizer=Chained: must be .* hooks that its __init__\(param_groups"),
    ):
        with pytest.raises(ValueError, match=reason):
            Sparse24Controller(model, optimizer, total_steps=2)
    controller = Sparse24Controller(model, Chained(muon, adamw, has_hooks=True), total_steps=2)
    gradients(model, 0.0)
    decayed = [0.5 * layer.weight.detach() * ~layer.sparse24["weight"].mask() for layer in model]
    controller.optimizer.step()
    assert controller.step == 1
    assert all(map(torch.equal, [layer.weight.grad for layer in model], decayed))  # once


def test_the_learning_rate_is_that_of_loaded_groups():
    """An optimizer that loads its state makes new group objects."""
    model = mlp(masked_decay=0.5, decay_on="weight")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    Sparse24Controller(model, optimizer, total_steps=4)
    optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())
    before, decayed = model[0].weight.detach().clone(), 0.5 * pruned_part(model)
    gradients(model, 0.0)
    optimizer.step()
    torch.testing.assert_close(model[0].weight.detach(), before - 0.1 * decayed)


def test_a_step_too_many_raises_and_changes_nothing():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    controller = Sparse24Controller(model, optimizer, total_steps=2)
    gradients(model, 1.0)
    for _ in range(2):
        optimizer.step()
    before = model[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"total_steps=2 are done"):
        optimizer.step()
    assert torch.equal(model[0].weight, before)
    controller.end()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


def test_a_new_controller_takes_over():
    """As when a notebook's cell runs again: the decay is added once."""
    model = mlp(masked_decay=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    first = Sparse24Controller(model, optimizer, total_steps=4)
    second = Sparse24Controller(model, optimizer, total_steps=4)
    assert second.is_running and not first.is_running
    before, decayed = model[0].weight.detach().clone(), 0.5 * pruned_part(model)
    gradients(model, 0.0)
    optimizer.step()
    torch.testing.assert_close(model[0].weight.detach(), before - decayed)
    assert (first.step, second.step) == (0, 1)
    first.end()  # says nothing about the second
    assert second.is_running


@pytest.mark.parametrize("again", [True, False])
def test_a_controller_ends_with_its_sparsity(again):
    """As in a notebook: unpatched, and patched again by another method."""
    model = mlp("t-sr-ste", masked_decay=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    first = Sparse24Controller(model, optimizer, total_steps=12)
    unpatch_model(model, sparse=False)
    assert not first.is_running
    if again:
        patch_model(model, Sparse24Config(method="ste", target_modules="all-linear"))
        Sparse24Controller(model, optimizer, total_steps=4)
    before = model[0].weight.detach().clone()
    gradients(model, 1.0)
    optimizer.step()
    torch.testing.assert_close(model[0].weight.detach(), before - 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {}, r"state={}"),
        (lambda state: state | {"step": 11}, r"step=11: must be an int in 0..10"),
        (lambda state: state | {"step": 2.0}, r"step=2.0: must be an int"),
        (lambda state: state | {"flips": {"other.weight": 3}}, r"state=.*other.weight"),
    ],
)
def test_state_that_is_not_a_controllers(change, message):
    model = mlp()
    controller = Sparse24Controller(model, torch.optim.SGD(model.parameters()), total_steps=10, step=3)
    before = controller.state_dict()
    with pytest.raises(ValueError, match=message):
        controller.load_state_dict(change(before))
    assert controller.state_dict() == before
    controller.load_state_dict(before | {"step": 2})
    assert controller.step == 2


def test_the_last_flip_rate_is_there_after_resuming():
    model = mlp("t-sr-ste", mask_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    controller = Sparse24Controller(model, optimizer, total_steps=12)
    for _ in range(3):
        model[0](torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    flips = controller.metrics()["flip_rate"]
    saved = controller.state_dict()
    resumed = Sparse24Controller(model, optimizer, total_steps=12)
    assert "flip_rate" not in resumed.metrics()
    resumed.load_state_dict(saved)
    assert resumed.metrics()["flip_rate"] == flips > 0
    assert resumed.layer_flip_rates() == controller.layer_flip_rates()


def test_training_without_a_controller_says_so_once(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr("hf_sparse24.run.logger.warning", said.append)
    model, x = mlp(), torch.randn(4, 8)
    model.eval()
    model[0](x)
    model.train()
    with torch.no_grad():
        model[0](x)
    assert not said
    for _ in range(3):
        model[0](x)
    assert len(said) == 1 and "Sparse24Callback.add_to(trainer)" in said[0]
    controlled = mlp()
    Sparse24Controller(controlled, torch.optim.SGD(controlled.parameters()), total_steps=3)
    controlled[0](x)
    frozen = mlp().requires_grad_(False)  # as under adapters
    frozen[0](x.requires_grad_())
    assert len(said) == 1


def test_what_cannot_be_trained_is_refused():
    flat, partitioned = mlp(), mlp()
    flat[0].weight = nn.Parameter(torch.randn(32))
    partitioned[0].weight.ds_id = 0
    for model, message in (
        (flat, r"0.weight is of shape \(32,\), flattened by FSDP1; use FSDP2"),
        (partitioned, "0.weight is partitioned by DeepSpeed ZeRO-3"),
    ):
        with pytest.raises(ValueError, match=message):
            Sparse24Controller(model, torch.optim.SGD(model.parameters()), total_steps=3)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.fused_backward = lambda loss, lr: None  # as lomo_optim's
    with pytest.raises(ValueError, match=r"optimizer=SGD: it updates weights within backward"):
        Sparse24Controller(model, optimizer, total_steps=3)
