"""The log of a run: its last evaluation, and its picture, by Matplotlib, an optional package."""

import math
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

from ..progress import get_logger

logger = get_logger(__name__)

Logs = Sequence[Mapping[str, Any]]  # `trainer.state.log_history`
History = dict[int, dict[str, float]]  # numbers by the step and by name

_NOT_METRICS = ("epoch", "_runtime", "_samples_per_second", "_steps_per_second", "_model_preparation_time")
PICTURE = "training.png"
MIN_LOGS = 10  # training draws no picture of fewer losses: they are as quickly read in its log
_LINE, _GRID = "#1d5fd1", "#e4e8ee"


class Line(NamedTuple):
    """A line of a panel. An evaluation is thicker, with a mark at every point."""

    name: str
    points: Sequence[tuple[int, float]]
    is_evaluation: bool = False


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


def is_available() -> bool:
    return find_spec("matplotlib") is not None


def write_picture(directory: Path, log_history: Logs) -> Path | None:
    """Write a PNG of a run's losses, flip rate and kept magnitude by the optimizer step.

    Args:
        directory: where to.
        log_history: of the run, as `trainer.state.log_history` has it.

    Returns:
        The file; None without two logs to join, or without Matplotlib. The same logs give the same bytes.
    """
    history = by_step(log_history)
    losses = _losses(history)
    if not losses:
        return None
    if not is_available():
        logger.warning(f"no {PICTURE}, the picture of this run: pip install matplotlib")
        return None
    panels = {"loss": losses}
    panels |= {key.replace("_", " "): _lines("training", history, key) for key in ("flip_rate", "kept_magnitude")}
    _draw({title: lines for title, lines in panels.items() if lines}, directory / PICTURE)
    return directory / PICTURE


def draw_training(directory: Path, log_history: Logs) -> None:
    """Write the picture of a run that has ended, if it has `MIN_LOGS` losses. A failure costs one warning."""
    if sum("loss" in entry for entry in log_history) >= MIN_LOGS:
        try:
            write_picture(directory, log_history)
        except Exception as error:  # a full disk, a broken Matplotlib
            logger.warning(f"no {PICTURE}, the picture of this run: {type(error).__name__}: {error}")


def _losses(history: History) -> list[Line]:
    """The training loss, and the loss on each evaluation set."""
    found = _lines("training", history, "loss")
    for key in sorted({key for row in history.values() for key in row if re.fullmatch(r"eval_(.+_)?loss", key)}):
        name = f"evaluation {key.removeprefix('eval_').removesuffix('loss').strip('_')}".strip()
        found += [line._replace(is_evaluation=True) for line in _lines(name, history, key)]
    return found


def _lines(name: str, history: History, key: str) -> list[Line]:
    """The one line of what was logged as `key`; none of fewer than two points."""
    points = [(step, row[key]) for step, row in history.items() if key in row]
    return [Line(name, points)] if len(points) > 1 else []


def _draw(panels: dict[str, list[Line]], path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"font.size": 9, "text.parse_math": False, "legend.frameon": False})
        figure = Figure((3.2 * len(panels), 2.7), dpi=100, layout="constrained")
        for axes, (title, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items()):
            for line in lines:
                axes.plot(
                    [step for step, _ in line.points],
                    [value if math.isfinite(value) else math.nan for _, value in line.points],
                    color=_LINE,
                    linewidth=1.8 if line.is_evaluation else 1,
                    marker="o" if line.is_evaluation else "",
                    markersize=4,
                    markerfacecolor="white",
                    label=line.name,
                )
            axes.set_title(title, loc="left", fontsize=10)
            axes.set_xlabel("optimizer step")
            axes.grid(axis="y", color=_GRID)
            axes.spines[["left", "right", "top"]].set_visible(False)
            axes.tick_params(axis="y", length=0)
            if len(lines) > 1:
                axes.legend(fontsize=8)
        figure.savefig(path, metadata={"Software": None})
