"""`hf-sparse24 report RUN`: one HTML file about a Trainer's run, which `run_files.py` reads and `charts.py` draws."""

import argparse
import json
import math
import os
import time
from base64 import b64encode
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ..files import written_whole
from ..hub.losses import evaluation_losses
from ..tables import html_table
from ..training.run_log import MEMORY, RUN_LOG, SPEED
from . import run_charts as charts
from .run_charts import X_LABEL, Series, loss_series, shown, some_rows
from .run_files import POINTS, RunFiles, layer_map, read_run, thinned

OTHERS = 12  # the most charts of numbers that the method or the Trainer logs besides ours
_DRAWN = {"loss", "learning_rate", "flip_rate", "kept_magnitude", "sparse_phase", SPEED, MEMORY}
_NOT_DRAWN = {"time", "epoch", "total_flos", "num_input_tokens_seen", "parameters"}


def report(options: argparse.Namespace) -> int:
    """Write the report of a run, and print where it is."""
    print(f"report  {write_report(options.directory, options.dense, options.output)}")
    return 0


def write_report(
    directory: str | os.PathLike, dense: str | os.PathLike | None = None, output: str | os.PathLike | None = None
) -> Path:
    """Write the report of a Trainer's `output_dir`, compared with a dense run's; returns its path.

    `output` is replaced where it exists; None stands for `report.html` in `directory`.
    """
    if not charts.is_available():
        raise ImportError("the report needs Matplotlib: pip install matplotlib")
    run, control = read_run(directory), None if dense is None else read_run(dense)
    if control is not None and control.has_phases:
        raise ValueError(f"{dense} is a run with sparse weights; --dense takes the control run, of a dense model")
    path = Path(directory) / "report.html" if output is None else Path(output)
    with written_whole(path) as part:
        part.write_text(_page(run, control), encoding="utf-8", errors="replace")  # JSON can hold half a letter
    return path


def _page(run: RunFiles, control: RunFiles | None) -> str:
    """Every string is escaped, and the page's policy lets a browser run no script and load nothing."""
    title = escape(f"{run.pattern} training: {run.directory.resolve().name}")
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    is_sparse = run.sparse24 or run.has_phases
    note = "" if is_sparse else '<p class="warning">Nothing in this run says that sparse weights were trained.</p>'
    cards = "".join(
        f"<div><dt>{escape(what)}</dt><dd>{escape(number)}<small>{escape(remark)}</small></dd></div>"
        for what, number, remark in _numbers(run, control)
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
{note}
<dl class="cards">{cards}</dl>
<main>
{"".join(_figures(run, control))}</main>
<section class="tables">
{"".join(_tables(run, control))}</section>
</body>
</html>
"""


def _figure(id: str, title: str, drawn: Any, note: str, is_wide: bool = False) -> str:
    """A chart with its title; `drawn` is None where there is nothing to draw, and `note` says why."""
    chart = '<p class="none">Nothing to draw.</p>'
    if drawn is not None:
        data = b64encode(charts.image(drawn, "svg")).decode()
        alt = escape(f"{title}. {note}")
        chart = f'<div class="chart"><img alt="{alt}" src="data:image/svg+xml;base64,{data}"></div>'
    wide = ' class="wide"' if is_wide else ""
    head = f'<h2 id="{id}">{escape(title)}</h2>'
    return f"<figure{wide}>{head}{chart}<figcaption>{escape(note)}</figcaption></figure>\n"


def _figures(run: RunFiles, control: RunFiles | None) -> Iterator[str]:
    dense, is_logged = run.dense_spans(), bool(run.starts)
    span = (0.0, float(max(run.steps, control.steps if control else 0)))

    def figure(id: str, title: str, lines: Sequence[Series], y_label: str, note: str, **options: Any) -> str:
        lines = [line for line in lines if line.points]
        drawn = charts.line_chart(lines, y_label, x_range=span, shaded=dense, **options) if lines else None
        return _figure(id, title, drawn, note if lines or is_logged else f"Not recorded: no {RUN_LOG}.", id == "loss")

    losses = [
        one._replace(points=thinned(list(one.points)))
        for name, of in _runs(run, control)
        for one in loss_series(name, of.history, of is control)
    ]
    note = " ".join(_loss_notes(run, control))
    yield figure("loss", "Loss", losses, "loss", note, size=(1100, 285), legend_columns=6)
    if control is not None:
        note = f"{run.pattern} minus dense, at the steps that both logged."
        yield figure("difference", "Loss above the dense control", _differences(run, control), "loss", note)
    rates = [Series(name, one.points("learning_rate"), one is control) for name, one in _runs(run, control)]
    yield figure("schedule", "Learning rate and phase", rates, "learning rate", _phase_note(run), from_zero=True)
    flips = [Series("flip rate, %", run.points("flip_rate", 100))]
    note = "Share of the sparse weights that entered or left the mask in the last measured step or mask refresh."
    if control is not None:  # it may log the flip rate that its masks would have
        flips.append(Series("of dense training, %", control.points("flip_rate", 100), True))
    yield figure("flips", "Flip rate", flips, "% of sparse weights", note, from_zero=True)
    kept = [Series("kept magnitude, %", run.points("kept_magnitude", 100))]
    note = "Share of the sparse weights' L1 norm that the masks keep. 2:4 masks of Gaussian weights keep 74.5%, "
    note += "transposable ones 70.3%."
    yield figure("kept", "Kept magnitude", kept, "% of the L1 norm", note)
    rows, edges, note = layer_map(run)
    cells = charts.heat_map(rows, edges) if rows else None
    yield _figure("layers", "Flip rate by layer", cells, note, is_wide=True)
    others = dict.fromkeys(key for row in run.history.values() if "loss" in row for key in row)
    names = [key for key in others if key not in _DRAWN | _NOT_DRAWN and not key.startswith(("eval_", "train_"))]
    for number, name in enumerate(names[:OTHERS]):
        yield figure(f"metric-{number}", name, [Series(name, run.points(name))], name, "As the run logged it.")
    speed, unit = run.points(SPEED), "optimizer steps per second"
    note = "Between one log and the next, evaluations and checkpoints left out."
    yield figure("speed", "Throughput", [Series(unit, speed)], unit, note, from_zero=True)
    memory = [Series("peak memory, GB", run.points(MEMORY))]
    note = "Of the first process: on a GPU what PyTorch has allocated, on a CPU all."
    yield figure("memory", "Peak memory", memory, "GB", note, from_zero=True)


def _runs(run: RunFiles, control: RunFiles | None) -> list[tuple[str, RunFiles]]:
    return [(run.pattern, run), *([] if control is None else [("dense control", control)])]


def _differences(run: RunFiles, control: RunFiles) -> list[Series]:
    series = []
    for key, name in (("loss", "training"), ("eval_loss", "evaluation")):
        own, other = ({step: row[key] for step, row in one.history.items() if key in row} for one in (run, control))
        points = thinned([(step, loss - other[step]) for step, loss in own.items() if step in other])
        series.append(Series(name, points, is_evaluation=key == "eval_loss"))
    return series


def _loss_notes(run: RunFiles, control: RunFiles | None) -> Iterator[str]:
    yield "Training losses are means since the log before."
    for name, one in _runs(run, control):
        for key in ("loss", *evaluation_losses(one.history)):
            gaps = [step for step, row in one.history.items() if key in row and not math.isfinite(row[key])]
            if gaps:
                yield f"{name}: {key} is not finite (a gap) at {len(gaps)} logs, first at step {gaps[0]}."
        logs = sum("loss" in row for row in one.history.values())
        if logs > POINTS:
            yield f"{name}: each point, here and below, is the mean of {math.ceil(logs / POINTS)} logs."


def _phase_note(run: RunFiles) -> str:
    if not run.has_phases:
        return "The phase was not logged."
    said = ", ".join(f"{start + 1:.0f} to {end:.0f}" for start, end in run.dense_spans())
    return f"Dense phase: steps {said}, as exact as the logs are frequent." if said else "Sparse at every log."


def _last(run: RunFiles, key: str) -> tuple[int, float] | None:
    """The last step at which a number was logged, and the number."""
    return next(((step, row[key]) for step, row in reversed(run.history.items()) if key in row), None)


def _numbers(run: RunFiles, control: RunFiles | None) -> Iterator[tuple[str, str, str]]:
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
    if run.samples_per_second is not None:
        dense = None if control is None else control.samples_per_second
        remark = "with evaluations" if dense is None else f"dense {shown(dense)}"
        yield "samples per second, whole run", shown(run.samples_per_second), remark
    if memory := [row[MEMORY] for row in run.history.values() if MEMORY in row]:
        yield "peak memory", f"{max(memory):.3g} GB", ""


def _tables(run: RunFiles, control: RunFiles | None) -> Iterator[str]:
    columns = [("training loss", run, "loss"), ("evaluation loss", run, "eval_loss")]
    if control is not None:
        columns += [("dense, training loss", control, "loss"), ("dense, evaluation loss", control, "eval_loss")]
    columns += [(key.replace("_", " "), run, key) for key in ("flip_rate", "kept_magnitude", "learning_rate")]
    rows = []
    for step in some_rows(run.history):
        cells = [one.history.get(step, {}).get(key) for _, one, key in columns]
        rows.append([step, *("" if value is None else shown(value) for value in cells)])
    yield f"<section class='wide'>{html_table('Numbers', [X_LABEL, *(name for name, *_ in columns)], rows)}</section>\n"
    begun = {}
    for start in run.starts:
        what = f"resumed at step {start['step']}" if start["step"] else "begun"
        begun[what] = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(start.get("time", 0)))
    versions, model = run.facts.get("versions"), run.config.items()
    for title, values in (
        ("Sparse24Config", run.sparse24),
        ("Arguments that are not the defaults", run.facts.get("arguments")),
        ("Run", begun | versions if isinstance(versions, dict) else begun),
        ("Model", {name: value for name, value in model if name != "quantization_config"}),
    ):
        if isinstance(values, dict) and values:
            pairs = [(name, _text(value)) for name, value in values.items()]
            yield f"<section>{html_table(title, (), pairs)}</section>\n"


def _text(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        return ", ".join(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
