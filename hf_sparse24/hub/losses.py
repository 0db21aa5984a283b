"""The log of a run: numbers by the step, and the metrics of its last evaluation."""

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

Logs = Sequence[Mapping[str, Any]]  # `trainer.state.log_history`
History = dict[int, dict[str, float]]  # numbers by the step and by name

_NOT_METRICS = ("epoch", "_runtime", "_samples_per_second", "_steps_per_second", "_model_preparation_time")


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
    """The numbers of the last evaluation by their names, `eval_loss` and others; empty where there was none."""
    evaluations = ({key: x for key, x in row.items() if key.startswith("eval_")} for row in reversed(history.values()))
    return next(filter(None, evaluations), {})


def metrics_of(numbers: Mapping[str, float]) -> dict[str, float]:
    """The numbers of an evaluation that measure the model, not the time that it took."""
    return {name: value for name, value in numbers.items() if not name.endswith(_NOT_METRICS)}
