"""What a Trainer has left of a run in its output directory, for the report.

The files are `trainer_state.json` (losses, learning rate, masks as a whole), `sparse24_log.jsonl` (flip rates by layer,
speed, memory, metrics of the method: see training/run_log.py), and `config.json`.
"""

import json
import math
import os
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from pathlib import Path
from statistics import fmean
from typing import Any

from ..charts import Point, Span
from ..checkpoints.losses import History, by_step
from ..training.run_log import RUN_LOG, LogLine, RunStart, read_run_log

STATE = "trainer_state.json"
POINTS = 300
"""The most points that a line has; more are averaged."""


@dataclass(frozen=True)
class Run:
    """What a run has left.

    Attributes:
        history: numbers logged with a loss or an evaluation, by step.
        speed: samples per second of the whole run by the Trainer, evaluations included; None before it ends.
        starts, lines: of the run log; empty where there is none.
        config: of the model.
        notes: what a reader must know about these files.
    """

    directory: Path
    history: History
    steps: int
    speed: float | None
    starts: list[RunStart]
    lines: list[LogLine]
    config: dict[str, Any]
    notes: list[str]

    @property
    def facts(self) -> dict[str, Any]:
        """What the last start of the run has recorded."""
        return self.starts[-1].facts if self.starts else {}

    @property
    def sparse24(self) -> dict[str, Any]:
        """The `Sparse24Config`, as a mapping."""
        own = self.facts.get("config") or self.config.get("quantization_config")
        return own if isinstance(own, dict) else {}

    @property
    def pattern(self) -> str:
        return str(self.sparse24.get("pattern", "2:4"))

    @property
    def has_phases(self) -> bool:
        """Whether it logged the phase of sparse weights."""
        return any("sparse_phase" in row for row in self.history.values())

    def points(self, key: str, factor: float = 1.0) -> list[Point]:
        """The line of a number that the Trainer logged."""
        return thinned([(step, factor * row[key]) for step, row in self.history.items() if key in row])

    def measured(self, field: str, factor: float = 1.0) -> list[Point]:
        """The line of a field of the run log."""
        values = [(line.step, getattr(line, field)) for line in self.lines]
        return thinned([(step, factor * value) for step, value in values if value is not None])

    def metrics(self) -> dict[str, list[Point]]:
        """The lines of the method's metrics, by name."""
        found: dict[str, list[Point]] = {}
        for line in self.lines:
            for name, value in line.metrics.items():
                found.setdefault(name, []).append((line.step, value))
        return {name: thinned(points) for name, points in found.items()}


def read_run(directory: str | os.PathLike) -> Run:
    """What a Trainer has left in its output directory, or in a checkpoint: the state of the most steps, or the log
    alone where no state was saved.

    Raises:
        ValueError: there is neither a `trainer_state.json` nor a log, or a file is damaged.
    """
    root = Path(directory)
    paths = [path for path in (root / STATE, *sorted(root.glob(f"checkpoint-*/{STATE}"))) if path.is_file()]
    starts, lines = read_run_log(root / RUN_LOG)
    lines = sorted({line.step: line for line in lines}.values())
    if not paths and not lines:
        raise ValueError(
            f"{root} is no run: neither it nor a checkpoint-* in it has a {STATE}, which trainer.save_state() and "
            f"every checkpoint write, nor has it a {RUN_LOG}"
        )
    if not paths:
        config, notes = root / "config.json", [f"There is no {STATE}: {RUN_LOG} has no evaluations."]
        history = by_step([line.logs | {"step": line.step} for line in lines])
        found = _read_json(config) if config.is_file() else {}
        return Run(root, history, lines[-1].step, None, starts, lines, found, notes)
    states = {path: _read_json(path) for path in paths}
    try:
        path = max(paths, key=lambda path: states[path]["global_step"])
        logs = states[path]["log_history"]
        history = by_step(logs)
        steps = max([index(states[path]["global_step"]), 1, *history])
        speeds = [entry["train_samples_per_second"] for entry in logs if "train_samples_per_second" in entry]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{root} has a {STATE} that is damaged: no Trainer wrote it so ({error!r})") from error
    configs = [file for file in (root / "config.json", path.parent / "config.json") if file.is_file()]
    notes = []
    if starts and path.stat().st_mtime < starts[0].time:
        notes.append(
            f"{path.relative_to(root)} is older than the run that {RUN_LOG} is of: losses, learning rate and masks as "
            f"a whole are of an earlier run, until this one saves a checkpoint."
        )
    return Run(
        root,
        history,
        max([steps, *(line.step for line in lines)]),
        speeds[-1] if speeds else None,
        starts,
        lines,
        _read_json(configs[0]) if configs else {},
        notes,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is cut short or damaged ({error}); delete it, or restore it") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object; delete it, or restore it")
    return found


def dense_spans(run: Run) -> list[Span]:
    """Ranges of steps in which the model computed densely, as exact as the logs: each has the phase that follows."""
    phases = [(step, row["sparse_phase"]) for step, row in run.history.items() if "sparse_phase" in row]
    if not phases:
        return []
    marks = [(0, phases[0][1]), *phases, (max(run.steps, phases[-1][0]), None)]
    spans: list[Span] = []
    for (start, phase), (end, _) in pairwise(marks):
        if phase == 0 and end > start:
            if spans and spans[-1][1] == start:
                start = int(spans.pop()[0])
            spans.append((start, end))
    return spans


def thinned(points: list[Point], most: int = POINTS) -> list[Point]:
    """At most `most` points: means of as many neighbours as it takes, at the last one's x; of the finite ones."""
    together = math.ceil(len(points) / most)
    if together <= 1:
        return points
    parts = [points[i : i + together] for i in range(0, len(points), together)]
    return [(part[-1][0], fmean([y for _, y in part if math.isfinite(y)] or [math.nan])) for part in parts]
