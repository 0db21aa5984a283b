"""The log of a run and of its dense control: numbers by the step, and the last evaluation."""

import os
import re
from collections.abc import Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any

from ..files import read_json

Logs = Sequence[Mapping[str, Any]]  # `trainer.state.log_history`, and the same in `trainer_state.json`
History = dict[int, dict[str, float]]  # numbers by the step and by name
Control = Mapping[str, float] | str | os.PathLike
"""A dense run to compare with: its metrics by name, its `trainer_state.json`, or the directory that holds one."""

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


def last_evaluation(history: History) -> dict[str, float]:
    """The metrics of the last evaluation by their names, `eval_loss` and others; empty where there was none."""
    for row in reversed(history.values()):
        metrics = {key: value for key, value in row.items() if key.startswith("eval_")}
        if metrics:
            return {key: value for key, value in metrics.items() if not key.endswith(_NOT_METRICS)}
    return {}


def control_history(control: Control | None) -> History:
    """The log of the dense run, empty where no file of it is given; ValueError: the file is no `trainer_state.json`."""
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


def evaluation_losses(history: History) -> list[str]:
    """The keys of a history's evaluation losses: `eval_loss`, or one for each of several evaluation sets."""
    return sorted({key for row in history.values() for key in row if re.fullmatch(r"eval_(.+_)?loss", key)})
