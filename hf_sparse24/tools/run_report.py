"""`hf-sparse24 report RUN`: one HTML file about a Trainer's run, from what it has left in its output directory.

The page needs nothing else: no server, no network. `run_files.py` says what it is made from.
"""

import argparse
import json
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from .. import charts
from ..charts import Row, Series, shown
from ..checkpoints.losses import evaluation_losses, loss_series, some_rows
from ..training.run_log import RUN_LOG, LogLine
from .page import Figure, page, table
from .run_files import POINTS, Run, dense_spans, read_run, thinned

COLUMNS, ROWS = 120, 48
"""The most columns that the heat map has, of more logs the means; and the most layers that have a row each."""
X_LABEL = "optimizer step"
LABEL = 40
"""The most letters that the name of a row has; of longer names the end is shown."""
_NO_LOG = f"Not recorded: {RUN_LOG} of the run is missing, or has no such numbers. Earlier versions did not write it."


def report(options: argparse.Namespace) -> int:
    """Write the report of a run, and print where it is."""
    print(f"report  {write_report(options.directory, options.dense, options.output)}")
    return 0


def write_report(
    directory: str | os.PathLike, dense: str | os.PathLike | None = None, output: str | os.PathLike | None = None
) -> Path:
    """Write the report of a run; returns its path.

    Args:
        directory: the `output_dir` of a Trainer.
        dense: that of a dense run, to compare with.
        output: the file; None for `report.html` in `directory`. One that exists is replaced, all at once.

    Raises:
        ValueError: a directory without a `trainer_state.json`, one that is damaged, or a control that is not dense.
        OSError: a file cannot be read or written.
        ImportError: Matplotlib is not installed.
    """
    if not charts.is_available():
        raise ImportError("the report needs Matplotlib: pip install 'hf_sparse24[report]'")
    run, control = read_run(directory), None if dense is None else read_run(dense)
    if control is not None and control.has_phases:
        raise ValueError(f"{dense} is a run with sparse weights; --dense takes the control run, of a dense model")
    doubt = [] if run.sparse24 or run.has_phases else [f"Nothing in {directory} says that sparse weights were trained."]
    text = page(
        title=f"{run.pattern} training: {run.directory.resolve().name}",
        notes=[*doubt, *run.notes, *([] if control is None else control.notes)],
        numbers=_numbers(run, control),
        figures=_figures(run, control),
        tables=_tables(run, control),
    )
    path = Path(directory) / "report.html" if output is None else Path(output)
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8", errors="replace")  # JSON can hold half a letter
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def _figures(run: Run, control: Run | None) -> Iterator[Figure]:
    dense = dense_spans(run)
    span = (0.0, float(max(run.steps, control.steps if control else 0)))

    def figure(id: str, title: str, lines: Sequence[Series], y_label: str, note: str, **options: Any) -> Figure:
        lines = [line for line in lines if line.points]
        if not lines:
            return Figure(id, title, "", note)
        chart = charts.line_chart(lines, X_LABEL, y_label, x_range=span, shaded=dense, **options)
        return Figure(id, title, charts.svg(chart, id), note)

    note = " ".join(_loss_notes(run, control))
    losses = figure("loss", "Loss", _losses(run, control), "loss", note, size=(1100, 285), legend_columns=6)
    yield losses._replace(is_wide=True)
    if control is not None:
        note = f"{run.pattern} minus dense, at the steps that both logged."
        yield figure("difference", "Loss above the dense control", _differences(run, control), "loss", note)
    rates = [Series(name, one.points("learning_rate"), one is control) for name, one in _runs(run, control)]
    yield figure("schedule", "Learning rate and phase", rates, "learning rate", _phase_note(run), from_zero=True)
    flips = [Series("flip rate, %", run.points("flip_rate", 100))]
    note = "Share of the sparse weights that entered or left the mask in the last measured step or mask refresh."
    if control is not None:
        # Where the control ran with a DenseFlipRateCallback.
        flips.append(Series("of dense training, %", control.points("flip_rate", 100), True))
    yield figure("flips", "Flip rate", flips, "% of sparse weights", note, from_zero=True)
    kept = [Series("kept magnitude, %", run.points("kept_magnitude", 100))]
    note = (
        "Share of the sparse weights' L1 norm that the masks keep. Of Gaussian weights, 2:4 masks keep 74.5%, "
        "transposable ones 70.3%."
    )
    yield figure("kept", "Kept magnitude", kept, "% of the L1 norm", note)
    yield _layers(run)
    for number, (name, points) in enumerate(run.metrics().items()):
        yield figure(f"metric-{number}", name, [Series(name, points)], name, "A metric of the method.")
    unit, speed = "tokens per second", run.measured("tokens_per_second")
    if not speed:
        unit, speed = "optimizer steps per second", run.measured("steps_per_second")
    note = "Between one log and the next, evaluations and checkpoints left out." if speed else _NO_LOG
    yield figure("speed", "Throughput", [Series(unit, speed)], unit, note, from_zero=True)
    memory = [Series("peak memory, GB", run.measured("peak_memory", 1e-9))]
    note = "Of the first process: on a GPU what PyTorch has allocated, on a CPU all." if memory[0].points else _NO_LOG
    yield figure("memory", "Peak memory", memory, "GB", note, from_zero=True)


def _runs(run: Run, control: Run | None) -> list[tuple[str, Run]]:
    return [(run.pattern, run), *([] if control is None else [("dense control", control)])]


def _losses(run: Run, control: Run | None) -> list[Series]:
    found = [one for name, of in _runs(run, control) for one in loss_series(name, of.history, of is control)]
    return [one._replace(points=thinned(list(one.points))) for one in found]


def _differences(run: Run, control: Run) -> list[Series]:
    series = []
    for key, name in (("loss", "training"), ("eval_loss", "evaluation")):
        own, other = ({step: row[key] for step, row in one.history.items() if key in row} for one in (run, control))
        points = thinned([(step, loss - other[step]) for step, loss in own.items() if step in other])
        series.append(Series(name, points, is_evaluation=key == "eval_loss"))
    return series


def _loss_notes(run: Run, control: Run | None) -> Iterator[str]:
    yield "Training losses are means since the log before."
    for name, one in _runs(run, control):
        for key in ("loss", *evaluation_losses(one.history)):
            gaps = [step for step, row in one.history.items() if key in row and not math.isfinite(row[key])]
            if gaps:
                yield f"{name}: {key} is not finite (a gap) at {len(gaps)} logs, first at step {gaps[0]}."
        logs = sum("loss" in row for row in one.history.values())
        if logs > POINTS:
            yield f"{name}: each point, here and below, is the mean of {math.ceil(logs / POINTS)} logs."


def _phase_note(run: Run) -> str:
    if not run.has_phases:
        return "The phase was not logged."
    said = ", ".join(f"{start + 1:.0f} to {end:.0f}" for start, end in dense_spans(run))
    return f"Dense phase: steps {said}, as exact as the logs are frequent." if said else "Sparse at every log."


def _layers(run: Run) -> Figure:
    """The heat map of flip rates by layer."""
    lines = [line for line in run.lines if line.flip_rates]
    if not lines:
        return Figure("layers", "Flip rate by layer", "", _NO_LOG, is_wide=True)
    sizes = {name: size for start in run.starts for name, size in start.facts["layers"].items()}
    measured = [name for name in sizes if any(name in line.flip_rates for line in lines)]
    groups, rule = grouped(measured)
    together = math.ceil(len(lines) / COLUMNS)
    columns = [lines[i : i + together] for i in range(0, len(lines), together)]
    rows = [Row(label, [_mean_rate(column, names, sizes) for column in columns]) for label, names in groups]
    edges = [min(run.starts[0].step, lines[0].step - 1), *(column[-1].step for column in columns)]
    mean = f" Each cell is the mean of {together} logs." if together > 1 else ""
    note = f"Rows: {len(measured)} layers{rule}, the first of the model at the top.{mean} A cell ends at the step "
    note += "it was logged at; shades follow the square root."
    svg = charts.svg(charts.heat_map(rows, edges, X_LABEL, "%"), "layers")
    return Figure("layers", "Flip rate by layer", svg, note, is_wide=True)


def grouped(names: Sequence[str]) -> tuple[list[tuple[str, list[str]]], str]:
    """The rows of a heat map, of each its label and its layers; and the rule in words.

    Up to `ROWS` layers have a row each. Beyond, layers of one block have one: those whose names agree up to the first
    number.
    """
    is_by_block = len(names) > ROWS
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


def _mean_rate(lines: Iterable[LogLine], names: Sequence[str], sizes: Mapping[str, int]) -> float | None:
    """In %, over the weights of some layers and over lines."""
    found = [(line.flip_rates[name], sizes[name]) for line in lines for name in names if name in line.flip_rates]
    weights = sum(size for _, size in found)
    return 100 * sum(rate * size for rate, size in found) / weights if weights else None


def _last(run: Run, key: str) -> tuple[int, float] | None:
    """The last step at which a number was logged, and the number."""
    return next(((step, row[key]) for step, row in reversed(run.history.items()) if key in row), None)


def _numbers(run: Run, control: Run | None) -> Iterator[tuple[str, str, str]]:
    """What to see first: what it is, the number, a remark."""
    layers = run.facts.get("layers")
    if run.sparse24.get("method"):
        yield "method", str(run.sparse24["method"]), run.pattern
    yield "steps", f"{run.steps:,}", ""
    if layers and run.facts.get("parameters"):
        share = sum(layers.values()) / run.facts["parameters"]
        yield "weights under the pattern", f"{share:.1%}", f"{len(layers)} layers"
    for key, name in (("loss", "training loss, last log"), ("eval_loss", "evaluation loss, last")):
        last, other = _last(run, key), None if control is None else _last(control, key)
        if last is not None:
            remark = f"at step {last[0]:,}"
            if other is not None:
                at = "" if other[0] == last[0] else f" at step {other[0]:,}"
                remark += f"; dense control {shown(other[1])}{at}, difference {last[1] - other[1]:+.3g}"
            yield name, shown(last[1]), remark
    for key, name in (("flip_rate", "flip rate, last"), ("kept_magnitude", "kept magnitude, last")):
        last = _last(run, key)
        if last is not None:
            yield name, f"{100 * last[1]:.3g}%", f"at step {last[0]:,}"
    if run.speed is not None:
        remark = "with evaluations" if control is None or control.speed is None else f"dense {shown(control.speed)}"
        yield "samples per second, whole run", shown(run.speed), remark
    memory = [line.peak_memory for line in run.lines if line.peak_memory is not None]
    if memory:
        yield "peak memory", f"{max(memory) / 1e9:.3g} GB", ""


def _tables(run: Run, control: Run | None) -> list[str]:
    columns = [("training loss", run, "loss"), ("evaluation loss", run, "eval_loss")]
    if control is not None:
        columns += [("dense, training loss", control, "loss"), ("dense, evaluation loss", control, "eval_loss")]
    columns += [(key.replace("_", " "), run, key) for key in ("flip_rate", "kept_magnitude", "learning_rate")]
    rows = []
    for step in some_rows(run.history):
        cells = [one.history.get(step, {}).get(key) for _, one, key in columns]
        rows.append([str(step), *("" if value is None else shown(value) for value in cells)])
    begun = {}
    for start in run.starts:
        what = f"resumed at step {start.step}" if start.step else "begun"
        begun[what] = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(start.time))
    facts = {name: run.facts[name] for name in ("device", "processes") if name in run.facts}
    model = {name: value for name, value in run.config.items() if name != "quantization_config"}
    return [
        table("Numbers", rows, [X_LABEL, *(name for name, *_ in columns)], is_wide=True),
        table("Sparse24Config", _pairs(run.sparse24)),
        table("Arguments that are not the defaults", _pairs(run.facts.get("arguments"))),
        table("Run", [*_pairs(begun), *_pairs(facts), *_pairs(run.facts.get("versions"))]),
        table("Model", _pairs(model)),
    ]


def _pairs(values: Any) -> list[tuple[str, str]]:
    return [(name, _text(value)) for name, value in values.items()] if isinstance(values, dict) else []


def _text(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        return ", ".join(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
