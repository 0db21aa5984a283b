"""Charts by Matplotlib, an optional package: lines over the optimizer steps and heat maps."""

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from ..hub.losses import History, evaluation_losses

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Point = tuple[float, float]
Span = tuple[float, float]

X_LABEL = "optimizer step"
_QUIET, _GRID, _BAND, _SPARSE, _DENSE, _HEAT = "#566173", "#e4e8ee", "#efe9dc", "#1d5fd1", "#b45309", "Blues"
_RC: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _QUIET),
    "svg.hashsalt": "hf_sparse24",  # the same chart gives the same file
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 11,
    **dict.fromkeys([f"axes.spines.{side}" for side in ("left", "right", "top")], False),
    "axes.axisbelow": True,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "grid.color": _GRID,
}


ROWS = 12


class Series(NamedTuple):
    """A line of a chart.

    Attributes:
        points: by ascending x; the line has a gap where y is not finite.
        is_dense: drawn dashed, in the colour of dense runs.
        is_evaluation: drawn thicker, with a mark at every point. Points without a neighbour always have a mark.
    """

    name: str
    points: Sequence[Point]
    is_dense: bool = False
    is_evaluation: bool = False


def is_available() -> bool:
    return find_spec("matplotlib") is not None


def shown(value: float) -> str:
    """A number in four digits, without zeros at its end."""
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def line_chart(
    series: Sequence[Series],
    y_label: str,
    *,
    x_range: Span | None = None,
    shaded: Sequence[Span] = (),
    from_zero: bool = False,
    size: tuple[int, int] = (540, 285),
    legend_columns: int = 3,
) -> "Figure":
    """Lines over the steps, with a legend where there is more than one thing to tell apart.

    `shaded` are the ranges of x in which the model computed densely; `size` is in pixels, in which text is 11 high.
    """
    with _styled():
        figure, axes = _figure(size)
        for start, end in shaded:
            axes.axvspan(start, end, color=_BAND, linewidth=0)
        handles: list[Any] = [_draw_line(axes, one) for one in series]
        if x_range is not None:
            axes.set_xlim(x_range)
        if from_zero:
            axes.set_ylim(bottom=0.0)
        axes.set(xlabel=X_LABEL, ylabel=y_label)
        axes.grid(axis="y")
        names = [one.name for one in series]
        if shaded:
            handles, names = [*handles, axes.patches[0]], [*names, "dense phase"]
        if len(handles) > 1:
            figure.legend(handles, names, loc="outside upper left", ncols=legend_columns)
    return figure


def heat_map(rows: Sequence[tuple[str, Sequence[float | None]]], edges: Sequence[float]) -> "Figure":
    """Cells in percent by row and step, the darker the larger, with a scale. Shades follow the value's square root.

    A row is its name and a value for each column, or None; `edges` are those of the columns on the x axis.
    """
    from matplotlib.colors import PowerNorm

    values = [[math.nan if value is None else value for value in row] for _, row in rows]
    largest = max((value for row in values for value in row if not math.isnan(value)), default=0.0)
    with _styled():
        figure, axes = _figure((1100, 95 + 15 * len(rows)))
        norm = PowerNorm(0.5, 0, largest or 1.0)
        mesh = axes.pcolormesh(list(edges), range(len(rows) + 1), values, cmap=_HEAT, norm=norm, rasterized=True)
        axes.hlines(range(len(rows)), edges[0], edges[-1], "white", linewidth=1)
        axes.set_yticks([i + 0.5 for i in range(len(rows))], [name for name, _ in rows])
        axes.set(xlabel=X_LABEL, xlim=(edges[0], edges[-1]), ylim=(len(rows), 0))
        scale = figure.colorbar(mesh, location="top", shrink=0.3, aspect=40, anchor=(0, 0), pad=0.01)
        scale.set_ticks([largest * part**2 for part in (0, 1 / 3, 2 / 3, 1)])
        scale.ax.xaxis.set_major_formatter(lambda value, _: f"{value:.2g}%")
        scale.outline.set_visible(False)
        scale.ax.tick_params(length=0)
    return figure


def image(figure: "Figure", format: str) -> bytes:
    """A figure as an `"svg"` or `"png"` file; the same figure gives the same bytes."""
    file = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if format == "svg" else {"Software": None}
    with _styled():
        figure.savefig(file, format=format, dpi=100, metadata=metadata)
    return file.getvalue()


@contextmanager
def _styled() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


def _figure(size: tuple[int, int]) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    # 72 dots per inch: then a point, the unit of fonts and lines, is a pixel.
    figure = Figure((size[0] / 72, size[1] / 72), dpi=72, layout="constrained")
    axes = figure.subplots()
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:g}")
    return figure, axes


def _draw_line(axes: "Axes", one: Series) -> "Line2D":
    """The line, drawn; points that no line reaches get a mark."""
    xs = [x for x, _ in one.points]
    ys = [y if math.isfinite(y) else math.nan for _, y in one.points]
    padded = [math.nan, *ys, math.nan]
    alone = [i for i in range(len(ys)) if math.isnan(padded[i]) and math.isnan(padded[i + 2])]
    (line,) = axes.plot(
        xs,
        ys,
        "--" if one.is_dense else "-",
        color=_DENSE if one.is_dense else _SPARSE,
        linewidth=2.5 if one.is_evaluation else 1.5,
        marker="o" if one.is_evaluation or alone else "",
        markevery=None if one.is_evaluation else alone,
        markerfacecolor="white",
        markeredgewidth=2,
        clip_on=False,
    )
    return line


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
