"""Losses of a run from a Trainer's log: by the step, as rows, as lines of a chart, and the last evaluation."""

import os
import re
from collections.abc import Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any

from ..files import read_json
from . import charts
from .charts import Series

Logs = Sequence[Mapping[str, Any]]  # `trainer.state.log_history`, and the same in `trainer_state.json`
History = dict[int, dict[str, float]]  # numbers by the step and by name
Control = Mapping[str, float] | str | os.PathLike
"""A dense run to compare with: its metrics by name, its `trainer_state.json`, or the directory that holds one."""

ROWS = 12
_NOT_METRICS = ("_runtime", "_samples_per_second", "_steps_per_second", "_model_preparation_time")


def by_step(log_history: Logs) -> History:
    """The numbers that were logged with a loss or an evaluation. TypeError: a step is no integer."""
    history: History = {}
    for entry in log_history:
        numbers = {key: value for key, value in entry.items() if isinstance(value, int | float)}
        if any(key == "loss" or key.startswith("eval_") for key in numbers):
            step = index(entry["step"])
            del numbers["step"]
            history.setdefault(step, {}).update(numbers)
    return dict(sorted(history.items()))


def some_rows(history: History) -> History:
    """At most `ROWS` evenly spaced steps, of those with a validation loss or of all, with the latest training loss."""
    latest: dict[str, float] = {}
    rows: History = {}
    for step, row in history.items():
        latest |= {key: row[key] for key in ("loss", "flip_rate") if key in row}
        rows[step] = latest | row
    evaluated = {step: row for step, row in rows.items() if "eval_loss" in row}
    steps = list(evaluated if len(evaluated) > 1 else rows)
    if len(steps) > ROWS:
        steps = [steps[round(i * (len(steps) - 1) / (ROWS - 1))] for i in range(ROWS)]
    return {step: rows[step] for step in steps}


def last_evaluation(history: History) -> dict[str, float]:
    """The metrics of the last evaluation by their names, `eval_loss` and others; empty where there was none."""
    for row in reversed(history.values()):
        metrics = {key: value for key, value in row.items() if key.startswith("eval_")}
        if metrics:
            return {key: value for key, value in metrics.items() if not key.endswith(_NOT_METRICS)}
    return {}


def control_history(control: Control | None) -> History:
    """What the dense run has logged, where its file is given; ValueError: the file is no `trainer_state.json`."""
    if control is None or isinstance(control, Mapping):
        return {}
    path = Path(control)
    path = path / "trainer_state.json" if path.is_dir() else path
    try:
        return by_step(read_json(path)["log_history"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        way = "must be metrics by name, such as {'eval_loss': 3.21}, or the trainer_state.json of a dense run"
        raise ValueError(f"dense_control={str(control)!r}: {way} ({error!r})") from error


def control_metrics(control: Control | None) -> dict[str, float]:
    """The metrics of the dense run; ValueError: it has none."""
    if control is None:
        return {}
    metrics = dict(control) if isinstance(control, Mapping) else last_evaluation(control_history(control))
    if not metrics or not all(isinstance(value, int | float) for value in metrics.values()):
        way = "evaluate it as it trains (eval_strategy), or pass numbers by name, such as {'eval_loss': 3.21}"
        raise ValueError(f"dense_control={str(control)!r}: that run logged no evaluation; {way}")
    return metrics


def loss_series(name: str, history: History, is_dense: bool = False) -> list[Series]:
    """The lines of a run's training loss and of the loss on each evaluation set; `name` is the run's."""
    found = []
    for key in ("loss", *evaluation_losses(history)):
        points = [(step, row[key]) for step, row in history.items() if key in row]
        part = key.removeprefix("eval_").removesuffix("loss").strip("_")  # which of several evaluation sets
        kind = "training" if key == "loss" else f"evaluation {part}".strip()
        if points:
            found.append(Series(f"{name}, {kind}", points, is_dense, is_evaluation=key != "loss"))
    return found


def evaluation_losses(history: History) -> list[str]:
    """The keys of a history's evaluation losses: `eval_loss`, or one for each of several evaluation sets."""
    return sorted({key for row in history.values() for key in row if re.fullmatch(r"eval_(.+_)?loss", key)})


def plot_losses(log_history: Logs, control: Control | None = None) -> bytes | None:
    """A PNG of the losses by the step, also of the dense run; None without two losses to join or without Matplotlib."""
    own = [one for one in loss_series("2:4", by_step(log_history)) if len(one.points) > 1]
    if not own or not charts.is_available():
        return None
    dense = loss_series("dense", control_history(control), is_dense=True)
    series = [*own, *(one for one in dense if len(one.points) > 1)]
    return charts.image(charts.line_chart(series, "loss", size=(432, 252), legend_columns=2), "png")
