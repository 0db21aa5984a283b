"""What a run logs besides the Trainer's numbers: in its own file, and to trackers."""

import types

import psutil
import pytest
import torch
import zoo
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_runs import arguments, dataset, train
from transformers import Trainer, TrainerCallback

from hf_sparse24 import Sparse24Callback, Sparse24Config, Sparse24Controller, Sparse24Trainer, patch_model
from hf_sparse24 import sparse_weights as weights_of
from hf_sparse24.hub.losses import by_step
from hf_sparse24.training import run_log
from hf_sparse24.training.run_log import RUN_LOG, RunLog, peak_memory, read_lines
from hf_sparse24.weights.storage import layer_name

CONFIG = Sparse24Config(method="t-sr-ste", mask_interval=1)
LEARNS = {"learning_rate": 0.05}


class Log:
    """What the file of a run holds: its starts, and by the step the numbers and the flip rates of layers."""

    def __init__(self, folder):
        entries = [entry for _, _, entry in read_lines(folder / RUN_LOG)]
        self.starts = [entry for entry in entries if "layers" in entry]
        self.layers = self.starts[-1]["layers"]
        self.history = by_step(entries)
        self.flip_rates = {
            entry["step"]: {n: rate for n, rate in zip(self.layers, entry["flip_rates"]) if rate is not None}
            for entry in entries
            if "flip_rates" in entry
        }


class Watch(TrainerCallback):
    """Keeps the flip rates that the controller has at each log."""

    def __init__(self):
        self.seen: dict[int, dict[str, float]] = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            (callback,) = (one for one in self.callbacks if isinstance(one, Sparse24Callback))
            self.seen[state.global_step] = callback.controller.layer_flip_rates()


def watched(tmp_path, architecture: str = "llama", **overrides) -> tuple[Sparse24Trainer, Watch]:
    args = arguments(tmp_path, **LEARNS | overrides)
    run = Sparse24Trainer(zoo.build(architecture), args, train_dataset=dataset(), sparse24_config=CONFIG)
    watch = Watch()
    run.add_callback(watch)
    watch.callbacks = run.callback_handler.callbacks
    run.train()
    return run, watch


def lines_of(path) -> list[dict]:
    return [entry for _, _, entry in read_lines(path / RUN_LOG) if "loss" in entry]


def test_each_log_has_a_line(tmp_path):
    secrets = {"hub_token": "secret", "lr_scheduler_kwargs": {"key": "secret"}, "lr_scheduler_type": "constant"}
    run, watch = watched(tmp_path, **secrets)
    found, lines = Log(tmp_path), lines_of(tmp_path)
    assert [line["step"] for line in lines] == list(found.history) == [1, 2, 3, 4]
    for line, logged in zip(lines, run.state.log_history):
        rates = {name: pytest.approx(rate, rel=1e-3) for name, rate in watch.seen[line["step"]].items()}
        assert found.flip_rates.get(line["step"], {}) == rates
        assert line["steps_per_second"] > 0 and 0.01 < line["peak_memory_gb"] < 100
        assert logged.items() <= line.items()
    assert any(rate > 0 for rates in found.flip_rates.values() for rate in rates.values())
    sizes = {layer_name(name): weight.parameter.numel() for name, weight in weights_of(run.model).items()}
    assert found.layers == sizes
    assert found.starts[-1]["parameters"] == sum(parameter.numel() for parameter in run.model.parameters())
    assert (
        found.starts[-1]["config"]["method"] == "t-sr-ste"
        and found.starts[-1]["versions"]["torch"] == torch.__version__
    )
    given = found.starts[-1]["arguments"]
    assert given["max_steps"] == 4 and given["learning_rate"] == 0.05
    assert not {"adam_beta1", "hub_token", "lr_scheduler_kwargs", "output_dir"} & given.keys()
    assert "secret" not in (tmp_path / RUN_LOG).read_text()


def test_tensorboard_gets_the_same_and_the_console_does_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    run, _ = watched(tmp_path, report_to="tensorboard")
    printed = capsys.readouterr().out
    assert "'flip_rate'" in printed and "flip_rate/" not in printed and "peak_memory" not in printed
    assert not any("flip_rate/" in name for entry in run.state.log_history for name in entry)
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    found = Log(tmp_path)
    for name in found.layers:
        of_layer = {event.step: event.value for event in events.Scalars(f"train/flip_rate/{name}")}
        assert of_layer == {step: pytest.approx(rates[name]) for step, rates in found.flip_rates.items()}
    for name in ("loss", "learning_rate", "flip_rate", "kept_magnitude", "sparse_phase", "steps_per_second"):
        points = [(event.step, event.value) for event in events.Scalars(f"train/{name}")]
        assert points == [(step, pytest.approx(row[name])) for step, row in found.history.items() if name in row]
        assert points
    assert len(events.Scalars("train/peak_memory_gb")) == 4


@pytest.mark.parametrize("architecture", ["qwen3_moe", "albert"])
def test_stacks_and_shared_weights_have_one_rate(tmp_path, architecture):
    run, watch = watched(tmp_path, architecture)
    found = Log(tmp_path)
    distinct = {id(weight.parameter) for weight in weights_of(run.model).values()}
    assert len(found.layers) == len(distinct) > 1
    assert list(found.flip_rates[2]) == list(found.layers) == list(watch.seen[2])
    assert 4 not in found.flip_rates and not watch.seen[4]  # in the dense tail


def test_the_callback_in_another_trainer_writes_it_too(tmp_path, capsys):
    model = zoo.build("llama")
    patch_model(model, CONFIG)
    run = Trainer(model, arguments(tmp_path), train_dataset=dataset())
    Sparse24Callback.add_to(run)
    run.train()
    assert len(lines_of(tmp_path)) == 4 and "flip_rate/" not in capsys.readouterr().out


def test_evaluations_and_checkpoints_are_no_training_time(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: now)
    model = zoo.build("llama")
    patch_model(model)
    controller = Sparse24Controller(model, torch.optim.SGD(model.parameters()), total_steps=10)
    log = RunLog(arguments(tmp_path), types.SimpleNamespace(global_step=0), controller)
    controller.end()

    def at(seconds, call):
        nonlocal now
        now = seconds
        call()

    at(5.0, log.after_pause)  # eval_on_start
    at(7.0, log.after_step)
    at(17.0, log.after_pause)
    at(19.0, log.after_step)
    assert log.measure(6, {})["steps_per_second"] == 1.5
    at(99.0, log.after_pause)  # the evaluation after the log
    at(101.0, log.after_step)
    assert log.measure(10, {})["steps_per_second"] == 2
    assert "steps_per_second" not in log.measure(10, {})  # a log without a step


def test_a_resumed_run_keeps_what_it_goes_on_from(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2} | LEARNS
    train(tmp_path, config=CONFIG, **saving)
    path = tmp_path / RUN_LOG
    before = path.read_text().splitlines()
    path.write_text(path.read_text() + before[-1][:40])  # killed while it wrote
    flips = Log(tmp_path).flip_rates
    run = Sparse24Trainer(
        zoo.build("llama"), arguments(tmp_path, **saving), train_dataset=dataset(), sparse24_config=CONFIG
    )
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    after = path.read_text().splitlines()
    assert after[:3] == before[:3] and after[4:] != before[3:]
    found = Log(tmp_path)
    assert [start["step"] for start in found.starts] == [0, 2] and list(found.history) == [1, 2, 3, 4]
    assert found.flip_rates == flips  # the run equals the one that was not interrupted
    assert not list(tmp_path.glob("*.part"))


def test_a_start_is_not_later_than_the_files_after_it(tmp_path, monkeypatch):
    monkeypatch.setattr(run_log.time, "time", lambda: 1000.06)
    train(tmp_path)
    assert Log(tmp_path).starts[0]["time"] == 1000.0


def test_a_fresh_run_replaces_the_file(tmp_path):
    train(tmp_path)
    train(tmp_path, max_steps=2)
    found = Log(tmp_path)
    assert len(found.starts) == 1 and list(found.history) == [1, 2]


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
    assert [step for _, step, _ in read_lines(tmp_path / "kept")] == [0, 1, 2]


def test_a_picture_that_cannot_be_drawn_costs_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("hf_sparse24.hub.picture.write_picture", lambda *_: 1 / 0)
    run = Sparse24Trainer(zoo.build("llama"), arguments(tmp_path, max_steps=12), train_dataset=dataset())
    run.train()
    assert run.state.global_step == 12 and "ZeroDivisionError" in caplog.text


def test_other_processes_compute_and_do_not_write(tmp_path, monkeypatch):
    """Where weights are sharded, metrics are computed by all processes together."""
    calls = []
    measure = Sparse24Controller.layer_flip_rates
    monkeypatch.setattr(Sparse24Controller, "layer_flip_rates", lambda self: calls.append(1) or measure(self))
    monkeypatch.setattr(Trainer, "is_world_process_zero", lambda self: False)
    train(tmp_path)
    assert len(calls) == 4 and not (tmp_path / RUN_LOG).exists()


def test_a_run_that_logs_nothing_leaves_the_file_of_another(tmp_path):
    """The probes of a decay search are such runs."""
    train(tmp_path)
    before = (tmp_path / RUN_LOG).read_text()
    train(tmp_path, logging_strategy="no")
    assert (tmp_path / RUN_LOG).read_text() == before


@pytest.mark.parametrize("line", ['{"step": 7, "flip_ra', "[]", "\udcff", '{"step": "7", "loss": 1}'])
def test_lines_that_no_run_wrote_are_left_out(tmp_path, line):
    good = ['{"step": 0, "layers": {"a": 8, "b": 8}}', '{"step": 8, "loss": 1, "flip_rates": [0.5, null]}']
    (tmp_path / RUN_LOG).write_bytes("\n".join([good[0], line, good[1], ""]).encode(errors="surrogateescape"))
    found = Log(tmp_path)
    assert list(found.history) == [8] and found.flip_rates == {8: {"a": 0.5}}


def test_peak_memory(monkeypatch):
    now = psutil.Process().memory_info().rss
    assert 0.9 * now < peak_memory(torch.device("cpu")) < psutil.virtual_memory().total
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 123)
    assert peak_memory(torch.device("cuda", 0)) == 123
    monkeypatch.setattr(run_log, "resource", None)
    assert peak_memory(torch.device("cpu")) is None
