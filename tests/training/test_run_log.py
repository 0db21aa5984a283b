"""What a run logs besides the Trainer's numbers: in its own file, and to trackers."""

import json

import pytest
import torch
import zoo
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_runs import arguments, dataset, train
from transformers import Trainer, TrainerCallback

from hf_sparse24 import Sparse24Callback, Sparse24Config, Sparse24Trainer, patch_model
from hf_sparse24.training.run_log import OF_LAYER, RUN_LOG

CONFIG = Sparse24Config(method="t-sr-ste", mask_interval=1)
LEARNS = {"learning_rate": 0.05}


def entries(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / RUN_LOG).read_text().splitlines()]


def logs(folder) -> list[dict]:
    return [entry for entry in entries(folder) if "loss" in entry]


def flip_rates(folder) -> list[dict]:
    return [{name: rate for name, rate in entry.items() if name.startswith(OF_LAYER)} for entry in logs(folder)]


class Watch(TrainerCallback):
    """Keeps the flip rates that the controller has at each log."""

    def __init__(self):
        self.seen: list[dict[str, float]] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            (callback,) = (one for one in self.callbacks if isinstance(one, Sparse24Callback))
            self.seen.append({f"{OF_LAYER}{name}": x for name, x in callback.controller.layer_flip_rates().items()})


def watched(tmp_path, architecture: str = "llama", **overrides) -> tuple[Sparse24Trainer, Watch]:
    args = arguments(tmp_path, **LEARNS | overrides)
    run = Sparse24Trainer(zoo.build(architecture), args, train_dataset=dataset(), sparse24_config=CONFIG)
    watch = Watch()
    run.add_callback(watch)
    watch.callbacks = run.callback_handler.callbacks
    run.train()
    return run, watch


def test_each_log_has_a_line_and_tensorboard_the_same_and_the_console_does_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    run, watch = watched(tmp_path, report_to="tensorboard", hub_token="secret")
    printed = capsys.readouterr().out
    assert "'flip_rate'" in printed and OF_LAYER not in printed
    assert not any(OF_LAYER in name for entry in run.state.log_history for name in entry)
    start, lines = entries(tmp_path)[0], logs(tmp_path)
    assert start["config"]["method"] == "t-sr-ste" and start["versions"]["torch"] == torch.__version__
    assert "secret" not in (tmp_path / RUN_LOG).read_text()
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert flip_rates(tmp_path) == watch.seen
    assert any(rate > 0 for rates in watch.seen for rate in rates.values())
    assert all(logged.items() <= line.items() for line, logged in zip(lines, run.state.log_history))
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    for name in ("loss", "learning_rate", "flip_rate", "kept_magnitude", "sparse_phase", *watch.seen[1]):
        points = [(event.step, event.value) for event in events.Scalars(f"train/{name}")]
        assert points == [(line["step"], pytest.approx(line[name])) for line in lines if name in line]
        assert points


def test_the_callback_in_another_trainer_writes_it_too(tmp_path, capsys):
    model = zoo.build("llama")
    patch_model(model, CONFIG)
    run = Trainer(model, arguments(tmp_path), train_dataset=dataset())
    Sparse24Callback.add_to(run)
    run.train()
    assert len(logs(tmp_path)) == 4 and OF_LAYER not in capsys.readouterr().out


def test_a_resumed_run_keeps_what_it_goes_on_from(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2} | LEARNS
    train(tmp_path, config=CONFIG, **saving)
    path = tmp_path / RUN_LOG
    before, rates = path.read_text().splitlines(), flip_rates(tmp_path)
    path.write_text("\n".join([*before, "[]", '{"step": "1"}', before[-1][:40]]))  # killed while it wrote
    run = Sparse24Trainer(
        zoo.build("llama"), arguments(tmp_path, **saving), train_dataset=dataset(), sparse24_config=CONFIG
    )
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert path.read_text().splitlines()[:3] == before[:3]
    assert [entry["step"] for entry in entries(tmp_path)] == [0, 1, 2, 2, 3, 4, 4]  # the last one sums up
    assert flip_rates(tmp_path) == rates  # the run equals the one that was not interrupted


def test_a_fresh_run_replaces_the_file_unless_it_logs_nothing(tmp_path):
    """The probes of a decay search log nothing."""
    train(tmp_path)
    train(tmp_path, max_steps=2)
    assert [entry["step"] for entry in entries(tmp_path)] == [0, 1, 2, 2]
    before = (tmp_path / RUN_LOG).read_text()
    train(tmp_path, logging_strategy="no")
    assert (tmp_path / RUN_LOG).read_text() == before


def test_a_file_that_cannot_be_written_any_more_costs_one_warning(tmp_path, caplog):
    class Breaks(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                (tmp_path / RUN_LOG).rename(tmp_path / "kept")
                (tmp_path / RUN_LOG).mkdir()

    run = Sparse24Trainer(zoo.build("llama"), arguments(tmp_path), train_dataset=dataset(), callbacks=[Breaks()])
    run.train()
    warned = [record for record in caplog.records if RUN_LOG in record.getMessage()]
    assert run.state.global_step == 4 and len(warned) == 1
    assert len((tmp_path / "kept").read_text().splitlines()) == 3


def test_a_picture_that_cannot_be_drawn_costs_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("hf_sparse24.hub.picture.write_picture", lambda *_: 1 / 0)
    run = Sparse24Trainer(zoo.build("llama"), arguments(tmp_path, max_steps=12), train_dataset=dataset())
    run.train()
    assert run.state.global_step == 12 and "ZeroDivisionError" in caplog.text
