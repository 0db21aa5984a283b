"""Charts by Matplotlib: lines by the step and heat maps, as SVG for the page of a report and as PNG for a model card.

Matplotlib is an optional package (the extra `report`). It is imported where something is drawn.
"""

import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Point = tuple[float, float]
Span = tuple[float, float]

# Each stands for the CSS variable of its name, which a page may give another value on a dark screen.
COLOURS = {
    "page": "#fffffe",
    "quiet": "#566173",
    "grid": "#e4e8ee",
    "band": "#efe9dc",
    "sparse": "#1d5fd1",
    "dense": "#b45309",
    "heat": "#0b3d91",
}
_SHADES = 40
_RC: dict[Any, Any] = {
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), COLOURS["quiet"]
    ),
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "DejaVu Sans",
    "font.size": 11,
    **dict.fromkeys([f"axes.spines.{side}" for side in ("left", "right", "top")], False),
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "ytick.major.size": 0,
    "legend.frameon": False,
    "grid.color": COLOURS["grid"],
}


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


class Row(NamedTuple):
    """A row of a heat map: a value for each column, None where there is none."""

    name: str
    values: Sequence[float | None]


class Tip(NamedTuple):
    """A text to show where the pointer is within ranges of x and y; without `y`, at any height of the plot."""

    text: str
    x: Span
    y: Span | None = None


class Chart(NamedTuple):
    """A drawn figure and its tips."""

    figure: "Figure"
    tips: list[Tip]


def is_available() -> bool:
    """Whether Matplotlib is installed."""
    return find_spec("matplotlib") is not None


def shown(value: float) -> str:
    """A number in four digits, without zeros at its end."""
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def line_chart(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    x_range: Span | None = None,
    shaded: Sequence[Span] = (),
    from_zero: bool = False,
    size: tuple[int, int] = (540, 285),
    legend_columns: int = 3,
) -> Chart:
    """Lines over a common x axis, with a legend where there is more than one thing to tell apart.

    Args:
        shaded: ranges of x in which the model computed densely; they get a background.
        from_zero: whether the y axis begins at 0.
        size: width and height in pixels, in which text is 11 high.
    """
    with _styled():
        figure, axes = _figure(size)
        for start, end in shaded:
            axes.axvspan(start, end, color=COLOURS["band"], linewidth=0)
        handles: list[Any] = [_draw_line(axes, one) for one in series]
        if x_range is not None:
            axes.set_xlim(x_range)
        if from_zero:
            axes.set_ylim(bottom=0.0)
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.grid(axis="y")
        names = [one.name for one in series]
        if shaded:
            handles, names = [*handles, axes.patches[0]], [*names, "dense phase"]
        if len(handles) > 1:
            figure.legend(handles, names, loc="outside upper left", ncols=legend_columns)
    return Chart(figure, _line_tips(series, x_label, x_range or axes.get_xlim()))


def heat_map(rows: Sequence[Row], edges: Sequence[float], x_label: str, unit: str, width: int = 1100) -> Chart:
    """Cells by row and column, the darker the larger, with a scale. Shades follow the square root of the value, so that
    small values differ too. A row is 15 pixels high.

    Args:
        edges: of the columns on the x axis, ascending, one more than there are columns.
    """
    from matplotlib.colors import ListedColormap, PowerNorm, to_rgb

    values = [[math.nan if value is None else value for value in row.values] for row in rows]
    largest = max((value for row in values for value in row if not math.isnan(value)), default=0.0)
    heat = to_rgb(COLOURS["heat"])
    colours = ListedColormap([(*heat, 0.05 + 0.95 * i / (_SHADES - 1)) for i in range(_SHADES)])
    with _styled():
        figure, axes = _figure((width, 95 + 15 * len(rows)))
        norm = PowerNorm(0.5, 0, largest or 1.0)
        mesh = axes.pcolormesh(list(edges), range(len(rows) + 1), values, cmap=colours, norm=norm, clip_on=False)
        axes.hlines(range(len(rows)), edges[0], edges[-1], COLOURS["page"], linewidth=1)
        axes.set_yticks([i + 0.5 for i in range(len(rows))], [row.name for row in rows])
        axes.set(xlabel=x_label, xlim=(edges[0], edges[-1]), ylim=(len(rows), 0))
        scale = figure.colorbar(mesh, location="top", shrink=0.3, aspect=40, anchor=(0, 0), pad=0.01)
        scale.set_ticks([largest * part**2 for part in (0, 1 / 3, 2 / 3, 1)])
        scale.ax.xaxis.set_major_formatter(lambda value, _: f"{value:.2g}{unit}")
        scale.outline.set_visible(False)
        scale.ax.tick_params(length=0)
    tips = [
        Tip(f"{row.name}\n{shown(value)}{unit}, {x_label} {shown(span[1])}", span, (i, i + 1))
        for i, row in enumerate(rows)
        for value, span in zip(row.values, pairwise(edges))
        if value is not None
    ]
    return Chart(figure, tips)


def png(chart: Chart) -> bytes:
    """The chart as a PNG file; the same chart gives the same bytes."""
    file = io.BytesIO()
    with _styled():
        chart.figure.savefig(file, format="png", dpi=100, facecolor="white", metadata={"Software": None})
    return file.getvalue()


def svg(chart: Chart, labels: str) -> str:
    """The chart as an SVG element of an HTML page that defines the variables of `COLOURS`.

    Args:
        labels: the id of the element that holds the chart's title, for `aria-labelledby`.
    """
    with _styled():
        text = svg_text(chart.figure, {colour: name for name, colour in COLOURS.items()}, f"{labels}-")
    width, height = chart.figure.get_size_inches() * 72
    box = f'viewBox="0 0 {width:g} {height:g}"'
    head = f'<svg role="img" aria-labelledby="{labels}" {box}>'
    body = text[text.index(">") + 1 : text.rindex("</svg>")].replace("xlink:href", "href")
    boxes = "".join(_tip_box(chart.figure.axes[0], tip, height) for tip in chart.tips)
    return f'{head}{body}<g class="tips">{boxes}</g></svg>'


def svg_text(figure: "Figure", colours: Mapping[str, str], prefix: str) -> str:
    """Matplotlib's SVG element of a figure; the same figure gives the same text.

    Args:
        colours: from colours as Matplotlib writes them to the CSS variables that replace them.
        prefix: of ids, so that they are unique in a page.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*", "", text[text.index("<svg") :], flags=re.S)

    def rounded(number: re.Match) -> str:
        return f"{round(float(number[0]), 2) + 0.0:g}"  # never -0

    text = re.sub(r"<[^>]*>", lambda tag: re.sub(r"-?\d+\.\d{3,}", rounded, tag[0]), text)
    for colour, variable in colours.items():
        text = text.replace(colour, f"var(--{variable})")
    # Matplotlib hashes where objects are in memory; nothing refers to its other ids.
    referred = list(dict.fromkeys(re.findall(r"#([mpC][0-9a-f_]{10,})", text)))
    for number, identifier in enumerate(referred):
        text = text.replace(identifier, f"{prefix}{number}")
    text = re.sub(rf' id="(?!{prefix}\d+")[^"]*"', "", text)
    text = re.sub(r'(?<= d=")[^"]*', lambda path: " ".join(path[0].split()), text)
    return re.sub(r"\n\s*", "\n", text)


@contextmanager
def _styled() -> Iterator[None]:
    """Our style and no other. A character that the font of the measurements lacks is in a browser's."""
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
        color=COLOURS["dense" if one.is_dense else "sparse"],
        linewidth=2.5 if one.is_evaluation else 1.5,
        marker="o" if one.is_evaluation or alone else "",
        markevery=None if one.is_evaluation else alone,
        markerfacecolor=COLOURS["page"],
        markeredgewidth=2,
        clip_on=False,
    )
    return line


def _line_tips(series: Sequence[Series], x_label: str, x_range: Span) -> list[Tip]:
    """A tip around every x, with the numbers that stand there."""
    found: dict[float, list[str]] = {}
    for one in series:
        for x, y in one.points:
            found.setdefault(x, []).append(f"{one.name}: {shown(y)}")
    places = sorted(found)
    borders = [x_range[0], *((a + b) / 2 for a, b in pairwise(places)), x_range[1]]
    return [Tip("\n".join([f"{x_label} {shown(x)}", *found[x]]), span) for x, span in zip(places, pairwise(borders))]


def _tip_box(axes: "Axes", tip: Tip, height: float) -> str:
    """An invisible rectangle that shows the tip; `height` is that of the figure in points."""
    left, first = axes.transData.transform((tip.x[0], (tip.y or axes.get_ylim())[0]))
    right, second = axes.transData.transform((tip.x[1], (tip.y or axes.get_ylim())[1]))
    place = f'x="{left:.1f}" y="{height - max(first, second):.1f}"'
    size = f'width="{right - left:.1f}" height="{abs(second - first):.1f}"'
    return f"<rect {place} {size}><title>{escape(tip.text)}</title></rect>"
