"""Sparse24Callback in a plain Trainer."""

import pytest
import zoo
from training_runs import arguments, dataset
from transformers import Trainer, TrainerCallback

from hf_sparse24 import Sparse24Callback, Sparse24Config, Sparse24Controller, Sparse24Trainer, patch_model


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


def test_the_callback_needs_a_patched_model_and_its_trainer(tmp_path):
    run = Trainer(zoo.build("llama"), arguments(tmp_path), train_dataset=dataset(), callbacks=[Sparse24Callback()])
    with pytest.raises(ValueError, match=r"callbacks=\[Sparse24Callback\(\)\]: .*add_to\(trainer\)"):
        run.train()
    with pytest.raises(ValueError, match=r"not patched: .*quantization_config="):
        Sparse24Callback.add_to(run)  # at once, before an optimizer is made


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
