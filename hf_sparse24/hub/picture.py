"""The log of a run: its last evaluation, and its picture, by Matplotlib, an optional package."""

import math
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from operator import index
from pathlib import Path
from typing import Any

from ..progress import get_logger

logger = get_logger(__name__)

Logs = Sequence[Mapping[str, Any]]  # `trainer.state.log_history`
History = dict[int, dict[str, float]]  # numbers by the step and by name
Lines = dict[str, list[tuple[int, float]]]  # the points of each line of a panel by its name

_NOT_METRICS = ("epoch", "_runtime", "_samples_per_second", "_steps_per_second", "_model_preparation_time")
PICTURE = "training.png"
MIN_LOGS = 10  # training draws no picture of fewer losses: they are as quickly read in its log
_TRAINING = "training"  # the name of the line of what training logs; the others are evaluations
_LINE, _GRID = "#1d5fd1", "#e4e8ee"


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


def write_picture(directory: Path, log_history: Logs) -> Path | None:
    """The file, a PNG, of a run's losses, flip rate and kept magnitude by the optimizer step; None without two logs to
    join, or without Matplotlib. The same logs give the same bytes."""
    history = by_step(log_history)
    losses = _losses(history)
    if not losses:
        return None
    if find_spec("matplotlib") is None:
        logger.warning(f"no {PICTURE}, the picture of this run: pip install matplotlib")
        return None
    panels = {"loss": losses}
    panels |= {key.replace("_", " "): _lines(history, {_TRAINING: key}) for key in ("flip_rate", "kept_magnitude")}
    _draw({title: lines for title, lines in panels.items() if lines}, directory / PICTURE)
    return directory / PICTURE


def draw_training(directory: Path, log_history: Logs) -> None:
    """Write the picture of a run that has ended, if it has `MIN_LOGS` losses. A failure costs one warning."""
    if sum("loss" in entry for entry in log_history) >= MIN_LOGS:
        try:
            write_picture(directory, log_history)
        except Exception as error:  # a full disk, a broken Matplotlib
            logger.warning(f"no {PICTURE}, the picture of this run: {type(error).__name__}: {error}")


def _losses(history: History) -> Lines:
    """The training loss, and the loss on each evaluation set."""
    keys = {_TRAINING: "loss"}
    for key in sorted({key for row in history.values() for key in row if re.fullmatch(r"eval_(.+_)?loss", key)}):
        keys[f"evaluation {key.removeprefix('eval_').removesuffix('loss').strip('_')}".strip()] = key
    return _lines(history, keys)


def _lines(history: History, keys: Mapping[str, str]) -> Lines:
    """The lines of what was logged as `keys`, by their names; none of fewer than two points."""
    found = {name: [(step, row[key]) for step, row in history.items() if key in row] for name, key in keys.items()}
    return {name: points for name, points in found.items() if len(points) > 1}


def _draw(panels: dict[str, Lines], path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"font.size": 9, "text.parse_math": False, "legend.frameon": False})
        figure = Figure((3.2 * len(panels), 2.7), dpi=100, layout="constrained")
        for axes, (title, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items()):
            for name, points in lines.items():
                steps, values = zip(*points)
                numbers = [value if math.isfinite(value) else math.nan for value in values]
                # An evaluation is thicker, with a mark at every point.
                marked = {"linewidth": 1.8, "marker": "o", "markersize": 4, "markerfacecolor": "white"}
                style: dict[str, Any] = {"linewidth": 1} if name == _TRAINING else marked
                axes.plot(steps, numbers, color=_LINE, label=name, **style)
            axes.set_title(title, loc="left", fontsize=10)
            axes.set_xlabel("optimizer step")
            axes.grid(axis="y", color=_GRID)
            axes.spines[["left", "right", "top"]].set_visible(False)
            axes.tick_params(axis="y", length=0)
            if len(lines) > 1:
                axes.legend(fontsize=8)
        figure.savefig(path, metadata={"Software": None})
