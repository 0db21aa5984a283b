"""What a run records of itself beside the Trainer's own state, and what it keeps of an earlier one."""

import json
import types

import psutil
import pytest
import torch
import zoo
from training_runs import arguments, dataset, train
from transformers import Trainer, TrainerCallback

from hf_sparse24 import (
    Sparse24Callback,
    Sparse24Config,
    Sparse24Controller,
    Sparse24Trainer,
    __version__,
    patch_model,
    sparse_weights,
)
from hf_sparse24.run import patched_config
from hf_sparse24.training import run_log
from hf_sparse24.training.run_log import RUN_LOG, RunLog, peak_memory, read_run_log
from hf_sparse24.weights.place import layer_name

CONFIG = Sparse24Config(method="t-sr-ste", mask_interval=1)
LEARNS = {"learning_rate": 0.05}


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
    run, watch = (
        Sparse24Trainer(zoo.build(architecture), args, train_dataset=dataset(), sparse24_config=CONFIG),
        Watch(),
    )
    run.add_callback(watch)
    watch.callbacks = run.callback_handler.callbacks
    run.train()
    return run, watch


def test_each_log_has_a_line(tmp_path):
    secrets = {"hub_token": "secret", "lr_scheduler_kwargs": {"key": "secret"}, "lr_scheduler_type": "constant"}
    run, watch = watched(tmp_path, **secrets)
    ((start,), lines) = read_run_log(tmp_path / RUN_LOG)
    assert [line.step for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line.flip_rates == {name: pytest.approx(rate, rel=1e-3) for name, rate in watch.seen[line.step].items()}
        assert line.steps_per_second > 0 and line.tokens_per_second is None
        assert start.time <= line.time and line.peak_memory > 1e7
    assert any(rate > 0 for line in lines for rate in line.flip_rates.values())
    assert [line.time for line in lines] == sorted(line.time for line in lines)
    weights = sparse_weights(run.model)
    assert start.facts["layers"] == {layer_name(name): weight.parameter.numel() for name, weight in weights.items()}
    assert start.facts["parameters"] == sum(parameter.numel() for parameter in run.model.parameters())
    config = json.loads(json.dumps(patched_config(run.model).to_dict()))
    assert config.pop("phase") == "dense" and config.pop("finished") and start.facts["config"] == config
    assert start.facts["versions"]["hf_sparse24"] == __version__
    assert start.facts["versions"]["torch"] == torch.__version__
    given = start.facts["arguments"]
    assert given["max_steps"] == 4 and given["learning_rate"] == 0.05
    assert not {"adam_beta1", "hub_token", "lr_scheduler_kwargs", "output_dir"} & given.keys()
    assert "secret" not in (tmp_path / RUN_LOG).read_text()


@pytest.mark.parametrize("architecture", ["qwen3_moe", "albert"])
def test_stacks_and_shared_weights_have_one_rate(tmp_path, architecture):
    run, watch = watched(tmp_path, architecture)
    (start,), lines = read_run_log(tmp_path / RUN_LOG)
    distinct = {id(weight.parameter) for weight in sparse_weights(run.model).values()}
    assert len(start.facts["layers"]) == len(distinct) > 1
    assert list(lines[1].flip_rates) == list(start.facts["layers"]) == list(watch.seen[2])
    assert not lines[-1].flip_rates and not watch.seen[4]  # in the dense tail


def test_the_callback_in_another_trainer_writes_it_too(tmp_path):
    model = zoo.build("llama")
    patch_model(model, CONFIG)
    Trainer(model, arguments(tmp_path), train_dataset=dataset(), callbacks=[Sparse24Callback()]).train()
    assert len(read_run_log(tmp_path / RUN_LOG)[1]) == 4


def test_a_line_is_as_long_as_there_are_layers(tmp_path):
    """Names stand in the first line alone, and numbers have four digits, but for those of the Trainer."""
    train(tmp_path, config=Sparse24Config(target_modules="all-linear"), **LEARNS)
    start, *lines = (tmp_path / RUN_LOG).read_text().splitlines()
    layers = len(json.loads(start)["layers"])
    trainers = max(len(json.dumps(json.loads(line)["logs"])) for line in lines)
    assert layers == 14 and max(map(len, lines)) < 200 + trainers + 12 * layers


def test_tokens_where_the_trainer_counts_them(tmp_path):
    train(tmp_path, include_num_input_tokens_seen="all")
    for line in read_run_log(tmp_path / RUN_LOG)[1]:
        assert line.tokens_per_second == pytest.approx(line.steps_per_second * 2 * 12, rel=2e-3)


def test_evaluations_and_checkpoints_are_no_training_time(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(run_log.time, "perf_counter", lambda: now)
    model = zoo.build("llama")
    patch_model(model)
    controller = Sparse24Controller(model, torch.optim.SGD(model.parameters()), total_steps=10)
    state = types.SimpleNamespace(global_step=0, num_input_tokens_seen=0)
    log = RunLog(arguments(tmp_path), state, controller)
    controller.end()

    def at(seconds, call, *args):
        nonlocal now
        now = seconds
        call(*args)

    at(5.0, log.after_pause)  # eval_on_start
    at(7.0, log.after_step)
    at(17.0, log.after_pause)
    at(18.0, log.after_step)
    state.global_step = 6
    at(19.0, log.write, state, {}, {}, {})  # 2 s and 2 s of training
    at(99.0, log.after_pause)  # the evaluation after the log
    state.global_step = 10
    at(101.0, log.write, state, {"model.layers.0.mlp.up_proj": float("nan")}, {"norm": 2.0}, {})
    at(102.0, log.write, state, {}, {}, {})  # a log without a step
    lines = read_run_log(log.path)[1]
    assert [line.steps_per_second for line in lines] == [1.5, 2.0, None]
    assert lines[1].flip_rates == {}


def test_a_resumed_run_keeps_what_it_goes_on_from(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2} | LEARNS
    train(tmp_path, config=CONFIG, **saving)
    path = tmp_path / RUN_LOG
    before = path.read_text().splitlines()
    path.write_text(path.read_text() + before[-1][:40])  # killed while it wrote
    assert len(read_run_log(path)[1]) == 4
    run = Sparse24Trainer(
        zoo.build("llama"), arguments(tmp_path, **saving), train_dataset=dataset(), sparse24_config=CONFIG
    )
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    after = path.read_text().splitlines()
    assert after[:3] == before[:3] and after[4:] != before[3:] and len(after) == 6
    starts, lines = read_run_log(path)
    assert [start.step for start in starts] == [0, 2]
    assert [line.step for line in lines] == [1, 2, 3, 4]
    # The same steps again: the run equals the one that was not interrupted.
    assert [json.loads(line)["flip_rates"] for line in after[4:]] == [
        json.loads(line)["flip_rates"] for line in before[3:]
    ]
    assert not list(tmp_path.glob("*.part"))


def test_a_resumed_run_without_a_log_begins_one(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 2}
    train(tmp_path, config=CONFIG, **saving)
    (tmp_path / RUN_LOG).unlink()
    run = Sparse24Trainer(
        zoo.build("llama"), arguments(tmp_path, **saving), train_dataset=dataset(), sparse24_config=CONFIG
    )
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    starts, lines = read_run_log(tmp_path / RUN_LOG)
    assert [start.step for start in starts] == [2] and [line.step for line in lines] == [3, 4]


def test_a_fresh_run_starts_anew(tmp_path):
    train(tmp_path)
    train(tmp_path, max_steps=2)
    starts, lines = read_run_log(tmp_path / RUN_LOG)
    assert len(starts) == 1 and [line.step for line in lines] == [1, 2]


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if RUN_LOG in record.getMessage()]


def test_a_file_that_cannot_be_written_costs_one_warning(tmp_path, caplog):
    (tmp_path / RUN_LOG).mkdir()
    run = train(tmp_path)
    assert run.state.global_step == 4 and "flip_rate" in run.state.log_history[0]
    (warning,) = warnings_of(caplog)
    assert "cannot be written" in warning and str(tmp_path) in warning


def test_a_file_that_cannot_be_written_any_more_costs_one_warning(tmp_path, caplog):
    class Breaks(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                (tmp_path / RUN_LOG).rename(tmp_path / "kept")
                (tmp_path / RUN_LOG).mkdir()

    run = Sparse24Trainer(zoo.build("llama"), arguments(tmp_path), train_dataset=dataset(), callbacks=[Breaks()])
    run.train()
    assert run.state.global_step == 4 and len(warnings_of(caplog)) == 1
    assert [line.step for line in read_run_log(tmp_path / "kept")[1]] == [1, 2]


def test_other_processes_compute_and_do_not_write(tmp_path, monkeypatch):
    """Where weights are sharded, metrics are computed by all processes together."""
    calls = []
    measure = Sparse24Controller.layer_flip_rates
    monkeypatch.setattr(Sparse24Controller, "layer_flip_rates", lambda self: calls.append(1) or measure(self))
    monkeypatch.setattr(Trainer, "is_world_process_zero", lambda self: False)
    train(tmp_path)
    assert len(calls) == 4 and not (tmp_path / RUN_LOG).exists()


def test_a_run_that_logs_nothing_leaves_the_file_of_another(tmp_path):
    """Such as the probes for a masked decay."""
    train(tmp_path)
    before = (tmp_path / RUN_LOG).read_text()
    train(tmp_path, logging_strategy="no")
    assert (tmp_path / RUN_LOG).read_text() == before


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 7, "flip_ra',
        "[]",
        "\udcff",
        '{"step": "7", "flip_rates": []}',
        '{"step": 0, "layers": {"a": "many"}}',
        '{"step": 7, "flip_rates": null, "time": "now", "steps_per_second": NaN, "peak_memory": true}',
    ],
)
def test_lines_that_no_run_wrote(tmp_path, line):
    path = tmp_path / RUN_LOG
    good = ['{"step": 0, "time": 1.5, "layers": {"a": 8, "b": 8}}', '{"step": 8, "flip_rates": [0.5, null]}']
    path.write_bytes("\n".join([good[0], line, good[1], ""]).encode(errors="surrogateescape"))
    starts, lines = read_run_log(path)
    assert [start.time for start in starts] == [1.5]
    assert lines[-1].step == 8 and lines[-1].flip_rates == {"a": 0.5}
    assert all(number is None for other in lines[:-1] for number in other[1:-3]) and len(lines) <= 2


def test_no_file_no_lines(tmp_path):
    assert read_run_log(tmp_path / RUN_LOG) == ([], [])


def test_peak_memory(monkeypatch):
    now = psutil.Process().memory_info().rss
    assert 0.9 * now < peak_memory(torch.device("cpu")) < psutil.virtual_memory().total
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 123)
    assert peak_memory(torch.device("cuda", 0)) == 123
    monkeypatch.setattr(run_log, "resource", None)
    assert peak_memory(torch.device("cpu")) is None
