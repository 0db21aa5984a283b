"""Several processes train as one does with the same global batch: DDP and FSDP2, every method."""

import dataclasses
import re

import pytest
import ranks
import torch
import zoo
from distributed_runs import METHODS, SOME, check_equal, settings
from training_runs import arguments

from hf_sparse24 import (
    Sparse24Config,
    Sparse24Controller,
    Sparse24Trainer,
    export_model,
    patch_model,
    unpatch_model,
)
from hf_sparse24.run import patched_config


@pytest.mark.parametrize("method", SOME)
def test_two_processes_train_as_one_by_ddp(method):
    check_equal(2, "llama", settings(method), "ddp")


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_train_as_one_by_fsdp2(method):
    check_equal(2, "llama", settings(method), "fsdp2")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("method", METHODS)
def test_four_processes_train_as_one(method, engine):
    check_equal(4, "gpt2" if method == "sr-ste" else "llama", settings(method), engine)


@pytest.mark.parametrize(
    "difference, message",
    [
        ({"masked_decay": 0.1}, "masked_decay: 0.1, not 0.05"),
        ({"method": "ste"}, "method: 'ste', not 'sr-ste'"),
        ({"target_modules": "mlp"}, "target_modules: 'mlp', not 'all-linear'; the sparse weights: "),
    ],
)
def test_processes_with_different_configs_are_told_so(difference, message):
    for error in ranks.run(2, _differ, difference):
        assert "process 1 differs from process 0 in" in error and re.search(message, error)


def _refusal(model) -> str:
    """What a controller says of a model that it cannot train."""
    with pytest.raises(ValueError) as error:
        Sparse24Controller(model, torch.optim.SGD(model.parameters()), total_steps=4)
    return str(error.value)


def _differ(rank, world, difference):
    config = settings("sr-ste") | (difference if rank else {})
    if config["method"] == "ste":
        config = settings("ste")
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(**config))
    return _refusal(model)


def test_processes_that_start_from_different_weights_are_told_so():
    for error in ranks.run(2, _differ_in_weights):
        assert re.search("process 1 differs .* in masks and scales: .* made after the same torch.manual_seed", error)


def _differ_in_weights(rank, world):
    model = zoo.build("llama", seed=rank)
    patch_model(model, Sparse24Config(**settings("s-ste")))
    return _refusal(model)


@pytest.mark.parametrize("world", [1, 2])
def test_fsdp1_is_refused_by_name(world):
    ranks.run(world, _fsdp1)


def _fsdp1(rank, world):
    from torch.distributed.fsdp import FullyShardedDataParallel

    for use_orig_params in (False, True):
        model, dense = zoo.build("llama"), zoo.build("llama")
        patch_model(model)
        wrapped, wrapped_dense = (
            FullyShardedDataParallel(m, device_id=torch.device("cpu"), use_orig_params=use_orig_params)
            for m in (model, dense)
        )
        assert "FSDP1" in _refusal(wrapped)
        with pytest.raises(ValueError, match="FSDP1"):
            export_model(wrapped, "nowhere")
        with pytest.raises(ValueError, match="FSDP1"):
            patch_model(wrapped_dense)
        if not use_orig_params:
            with pytest.raises(RuntimeError, match="FSDP1"):
                unpatch_model(wrapped)


def _trainer(folder, **settings):
    model = zoo.build("llama")
    data = [{name: tensor[0] for name, tensor in zoo.batch(seed, rows=1).items()} for seed in range(64)]
    args = arguments(folder, max_steps=8, learning_rate=1e-2)
    config = Sparse24Config(**settings)
    return Sparse24Trainer(model, args, train_dataset=data, eval_dataset=data[:4], sparse24_config=config)


def test_a_trainer_that_evaluates_first_still_trains_together(tmp_path):
    first, second = ranks.run(2, _evaluate_then_train, tmp_path)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def _evaluate_then_train(rank, world, folder):
    trainer = _trainer(folder, method="s-ste")
    trainer.evaluate()
    trainer.train()
    assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
    return dict(trainer.model.state_dict())


@pytest.mark.slow
def test_the_first_process_determines_the_masked_decay(tmp_path):
    first, second = ranks.run(2, _auto_decay, tmp_path)
    assert first == second and first[0] == 0.01


def _auto_decay(rank, world, folder):
    trainer = _trainer(folder, method="sr-ste", masked_decay="auto")
    tuning = trainer.tune_masked_decay
    # Whatever the probes say, so that the test does not depend on a feasible candidate.
    trainer.tune_masked_decay = lambda: dataclasses.replace(tuning((2e-3, 2e-2)), chosen=0.01 + rank)
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return patched_config(trainer.model).masked_decay, losses
