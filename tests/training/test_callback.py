"""Sparse24Callback in a plain Trainer."""

import pytest
import torch
import zoo
from training_runs import arguments, dataset
from transformers import Trainer, TrainerCallback

from hf_sparse24 import Sparse24Callback, Sparse24Config, Sparse24Controller, Sparse24Trainer, patch_model
from hf_sparse24.run import sparse_run


def test_the_callback_in_a_plain_trainer_does_the_same(tmp_path):
    logs = []
    for make in (Sparse24Trainer, Trainer):
        model = zoo.build("llama")
        patch_model(model, Sparse24Config(method="t-sr-ste", mask_interval=1))
        run = make(model, arguments(tmp_path), train_dataset=dataset())
        assert Sparse24Callback.add_to(run) is run.callback_handler.callbacks[0]
        run.train()
        logs.append([log for log in run.state.log_history if "loss" in log])
    assert logs[0] == logs[1]
    assert logs[0][0]["flip_rate"] > 0


def test_the_callback_resumes_a_model_that_has_been_through_its_dense_tail(tmp_path):
    model = zoo.build("llama")
    patch_model(model, Sparse24Config(method="s-ste", dense_tail=2))
    run = Trainer(model, arguments(tmp_path, max_steps=8, save_strategy="steps", save_steps=4), train_dataset=dataset())
    Sparse24Callback.add_to(run)
    run.train()
    end = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert sparse_run(model).open_step is None  # nothing is kept once training has ended
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert all(torch.equal(tensor, end[name]) for name, tensor in model.state_dict().items())


def test_the_callback_needs_a_patched_model_and_its_trainer(tmp_path):
    run = Trainer(zoo.build("llama"), arguments(tmp_path), train_dataset=dataset(), callbacks=[Sparse24Callback()])
    with pytest.raises(ValueError, match=r"callbacks=\[Sparse24Callback\(\)\]: .*add_to\(trainer\)"):
        run.train()
    Sparse24Callback.add_to(run)
    with pytest.raises(ValueError, match="not patched; call patch_model"):
        run.train()


def test_one_callback_is_enough(tmp_path):
    run = Sparse24Trainer(zoo.build("llama"), arguments(tmp_path), callbacks=[Sparse24Callback()])
    Sparse24Callback.add_to(run)
    assert [type(callback) for callback in run.callback_handler.callbacks].count(Sparse24Callback) == 1
    assert run.callback_handler.callbacks[0] is run.sparse24_callback


def test_a_controller_made_during_training_is_not_overlooked(tmp_path):
    class Intruder(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
            Sparse24Controller(model, optimizer, total_steps=4)

    run = Sparse24Trainer(zoo.build("llama"), arguments(tmp_path), train_dataset=dataset(), callbacks=[Intruder()])
    with pytest.raises(RuntimeError, match="another Sparse24Controller has taken this model over"):
        run.train()
