"""The warning where a method disturbs a trained model: when it comes, and that it changes nothing else."""

import copy

import pytest
import ranks
import torch
import zoo
from method_runs import every_method, trainer
from torch import nn
from training_runs import arguments, dataset, weights
from transformers import Trainer

from hf_sparse24 import Sparse24Callback, Sparse24Config, Sparse24Trainer, oneshot, patch_model, sparse_run
from hf_sparse24.training import callback as callback_module

DISTURBS = "disturbs a model that is trained already"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> nn.Module:
    """A dense model that has learned its data."""
    args = arguments(tmp_path_factory.mktemp("dense"), max_steps=30, learning_rate=1e-2)
    run = Trainer(zoo.build("llama"), args, train_dataset=learned())
    run.train()
    assert run.state.log_history[-2]["loss"] < 2
    return run.model


def learned():
    """One row again and again: all batches have the same loss."""
    return dataset(1).select([0] * 16)


def told(caplog) -> list[str]:
    return [message for message in caplog.messages if DISTURBS in message]


def run_of(model: nn.Module, directory, method: str = "s-ste", **overrides) -> Sparse24Trainer:
    config = Sparse24Config(method=method, target_modules="all-linear", pattern="1:8")
    args = arguments(directory, **({"max_steps": 2} | overrides))
    return Sparse24Trainer(copy.deepcopy(model), args, train_dataset=learned(), sparse24_config=config)


def test_a_trained_model_is_told_of_with_both_losses(trained, tmp_path, caplog):
    run = run_of(trained, tmp_path, gradient_accumulation_steps=2, save_strategy="steps", save_steps=1)
    run.train()
    (message,) = told(caplog)
    patched = copy.deepcopy(trained)
    patch_model(patched, run.sparse24_config)
    batch = {name: values[:2] for name, values in learned().with_format("torch")[:].items()}
    sparse, dense = (model.eval()(**batch).loss.item() for model in (patched, trained))
    assert f"is {sparse:.2f} with the sparse weights and {dense:.2f} with the dense ones: method 's-ste'" in message
    assert "oneshot(model, batches) first" in message and run.model.training
    caplog.clear()
    run_of(trained, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert not told(caplog)


def test_who_is_not_told(trained, tmp_path, caplog):
    scratch = zoo.build("llama")
    pruned = copy.deepcopy(trained)
    oneshot(pruned, [row["input_ids"][None] for row in learned().with_format("torch")])
    for model in (scratch, pruned):
        Sparse24Trainer(model, arguments(tmp_path), train_dataset=learned()).train()
    run_of(trained, tmp_path, method="step", max_steps=8).train()  # dense until it switches
    assert not told(caplog)


@every_method
def test_training_is_the_same_with_and_without(method, tmp_path, monkeypatch):
    """Bit for bit, with dropout and random gradients."""
    ends = []
    for checks in (True, False):
        if not checks:
            monkeypatch.setattr(callback_module, "check_first_loss", lambda controller: None)
        model = zoo.build("gpt2", resid_pdrop=0.1)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1
        run = trainer(model, tmp_path / str(checks), method, max_steps=4)
        run.train()
        ends.append((weights(run.model), [log.get("loss") for log in run.state.log_history]))
    assert torch.equal(ends[0][0], ends[1][0]) and ends[0][1] == ends[1][1]


def test_the_callback_in_a_plain_trainer(trained, tmp_path, caplog):
    model = copy.deepcopy(trained)
    patch_model(model, Sparse24Config(target_modules="all-linear", pattern="1:8"))
    run = Trainer(model, arguments(tmp_path), train_dataset=learned())
    Sparse24Callback.add_to(run)
    run.train()
    assert len(told(caplog)) == 1 and not model._forward_pre_hooks and sparse_run(model).phase == "sparse"


def test_several_processes(tmp_path):
    results = ranks.run(2, _train, str(tmp_path))
    assert results[0] == results[1]


def _train(rank, world, directory):
    run = Sparse24Trainer(zoo.build("llama"), arguments(directory), train_dataset=dataset())
    run.train()
    return weights(run.model).sum().item()
