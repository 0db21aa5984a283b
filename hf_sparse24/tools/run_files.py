"""read_run: what a Trainer leaves of a run in its output directory, for the report."""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, takewhile
from operator import index
from pathlib import Path
from statistics import fmean
from typing import Any

from ..files import read_json
from ..hub.losses import History, by_step
from ..training.run_log import RUN_LOG, read_lines
from .run_charts import Point, Span

STATE = "trainer_state.json"
POINTS = 300  # the most points that a line has; more are averaged
COLUMNS, ROWS = 120, 48  # the most columns that the map of layers has, and the most layers that have a row each
LAST_TIME = 10**11  # seconds, in the year 5138: a later time is damage
LABEL = 40  # the most letters that the name of a row has; of longer names the end is shown


@dataclass(frozen=True)
class RunFiles:
    """What the files of a run hold."""

    directory: Path
    history: History  # numbers logged with a loss or an evaluation, by step and name
    steps: int  # optimizer steps done
    samples_per_second: float | None  # of the whole run by the Trainer, evaluations included; None before it ends
    starts: list[dict[str, Any]]  # the lines of the run log where the run starts or resumes
    flip_rates: dict[int, dict[str, float]]  # by step and layer
    config: dict[str, Any]  # of the model

    @property
    def facts(self) -> dict[str, Any]:
        """What the last start of the run has recorded."""
        return self.starts[-1] if self.starts else {}

    @property
    def sparse24(self) -> dict[str, Any]:
        """The `Sparse24Config`, as a mapping."""
        own = self.facts.get("config") or self.config.get("quantization_config")
        return own if isinstance(own, dict) else {}

    @property
    def pattern(self) -> str:
        own = self.sparse24.get("layer_patterns") or {}
        return " and ".join(dict.fromkeys([str(self.sparse24.get("pattern", "2:4")), *map(str, own.values())]))

    @property
    def has_phases(self) -> bool:
        return any("sparse_phase" in row for row in self.history.values())

    def points(self, key: str, factor: float = 1.0) -> list[Point]:
        return thinned([(step, factor * row[key]) for step, row in self.history.items() if key in row])

    def dense_spans(self) -> list[Span]:
        """Ranges of steps in which the model computed densely. Each log has the phase of the steps after it."""
        phases = [(step, row["sparse_phase"]) for step, row in self.history.items() if "sparse_phase" in row]
        if not phases:
            return []
        marks = [(0, phases[0][1]), *phases, (max(self.steps, phases[-1][0]), 1.0)]
        spans: list[Span] = []
        for phase, pairs in groupby(pairwise(marks), key=lambda pair: pair[0][1]):
            steps = [step for pair in pairs for step, _ in pair]
            if phase == 0 and steps[-1] > steps[0]:
                spans.append((steps[0], steps[-1]))
        return spans


def read_run(directory: str | os.PathLike) -> RunFiles:
    """The run log of an output directory, and its `trainer_state.json` of the most steps."""
    root = Path(directory)
    entries = [entry for _, _, entry in read_lines(root / RUN_LOG)]
    starts = [entry for entry in entries if _is_start(entry)]
    states = {
        path: read_json(path)
        for path in (root / STATE, *sorted(root.glob(f"checkpoint-*/{STATE}")))
        if path.is_file() and not (starts and path.stat().st_mtime < starts[0].get("time", 0))  # of an earlier run
    }
    if not states and not entries:
        raise ValueError(f"{root} is no run: it has no {RUN_LOG}, and neither it nor a checkpoint-* in it a {STATE}")
    configs = [root / "config.json"]
    steps, logs = 1, []
    try:
        if states:
            path = max(states, key=lambda path: states[path]["global_step"])
            steps, logs = index(states[path]["global_step"]), states[path]["log_history"]
            configs.append(path.parent / "config.json")
        history = by_step([*logs, *entries])
        speeds = [float(e["train_samples_per_second"]) for e in [*logs, *entries] if "train_samples_per_second" in e]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{root} has a {STATE} that is damaged ({error!r}); delete it, or restore it") from error
    return RunFiles(
        root,
        history,
        max([steps, 1, *history]),
        speeds[-1] if speeds else None,
        starts,
        _flip_rates(entries),
        next((read_json(file) for file in configs if file.is_file()), {}),
    )


def _is_start(entry: dict[str, Any]) -> bool:
    """Whether a line of a run log says where the run starts or resumes: weights by layer, and perhaps a time."""
    layers, time = entry.get("layers"), entry.get("time", 0)
    sizes = layers.values() if isinstance(layers, dict) else [None]
    return all(isinstance(size, int) for size in sizes) and isinstance(time, int | float) and 0 <= time < LAST_TIME


def _flip_rates(entries: list[dict[str, Any]]) -> dict[int, dict[str, float]]:
    names: list[str] = []
    found = {}
    for entry in entries:
        names = list(entry["layers"]) if _is_start(entry) else names
        rates = entry.get("flip_rates")
        if isinstance(rates, list):
            found[entry["step"]] = {n: rate for n, rate in zip(names, rates) if isinstance(rate, int | float)}
    return found


def thinned(points: list[Point]) -> list[Point]:
    """At most `POINTS` points: means of as many neighbours as it takes, at the last one's x; of the finite ones."""
    together = math.ceil(len(points) / POINTS)
    if together <= 1:
        return points
    parts = [points[i : i + together] for i in range(0, len(points), together)]
    return [(part[-1][0], fmean([y for _, y in part if math.isfinite(y)] or [math.nan])) for part in parts]


def layer_map(run: RunFiles) -> tuple[list[tuple[str, list[float | None]]], list[float], str]:
    """The flip rates by layer in %: rows of cells by label, the steps where cells end, and a note on them."""
    logs = [(step, rates) for step, rates in run.flip_rates.items() if rates]
    if not logs:
        return [], [], f"Not recorded: {RUN_LOG} is missing, or has none."
    sizes = {name: size for start in run.starts for name, size in start["layers"].items()}
    groups, rule = grouped([name for name in sizes if any(name in rates for _, rates in logs)])
    together = math.ceil(len(logs) / COLUMNS)
    columns = [logs[i : i + together] for i in range(0, len(logs), together)]

    def mean(column: Sequence[tuple[int, dict[str, float]]], names: Sequence[str]) -> float | None:
        found = [(rates[name], sizes[name]) for _, rates in column for name in names if name in rates]
        return 100 * sum(rate * size for rate, size in found) / sum(size for _, size in found) if found else None

    note = f"Rows: {sum(len(names) for _, names in groups)} layers{rule}, the first of the model at the top. "
    note += f"Each cell is the mean of {together} logs. " if together > 1 else ""
    note += "A cell ends at the step it was logged at; shades follow the square root."
    edges = [min(run.starts[0]["step"], logs[0][0] - 1), *(column[-1][0] for column in columns)]
    return [(label, [mean(column, names) for column in columns]) for label, names in groups], edges, note


def grouped(names: Sequence[str]) -> tuple[list[tuple[str, list[str]]], str]:
    """The rows of a heat map, of each its label and its layers; and the rule in words."""
    is_by_block = len(names) > ROWS  # then layers share a row whose names agree up to the first number
    groups: dict[str, list[str]] = {}
    for name in names:
        key = re.sub(r"((?:^|\.)\d+)\..*", r"\1", name) if is_by_block else name
        groups.setdefault(key, []).append(name)
    parts = zip(*(key.split(".")[:-1] for key in groups))
    prefix = "".join(f"{same[0]}." for same in takewhile(lambda names: len(set(names)) == 1, parts))
    labels = [key.removeprefix(prefix) for key in groups]
    labels = [label if len(label) <= LABEL else f"…{label[1 - LABEL :]}" for label in labels]
    rule = (f" of {prefix}*" if prefix else "") + (", averaged by block" if is_by_block else "")
    return list(zip(labels, groups.values())), rule
