"""Charts as SVG by pure functions: numbers in, markup out. Colours and dashes are CSS classes of the page around them.

Every string is escaped. What carries `data-tip` is to be shown where the pointer is, below the `data-row` around it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise

Point = tuple[float, float]
Span = tuple[float, float]

_LEFT, _RIGHT, _TOP, _BOTTOM, _HEIGHT = 62, 14, 8, 40, 260
_LETTER = 6.2  # mean width of one, in the units of the view box, at the font size of the page


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    Attributes:
        points: by ascending x; where y is not finite, the line has a gap.
        style: CSS classes of the line.
        has_marks: whether every point has a mark; one that has no neighbour always has.
    """

    name: str
    points: Sequence[Point]
    style: str
    has_marks: bool = False


@dataclass(frozen=True)
class Row:
    """A row of a heat map: a value for each column, None where there is none."""

    name: str
    values: Sequence[float | None]


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most `most` + 1 round numbers, evenly spaced, the first <= `low` and the last >= `high`.

    Their distance is 1, 2 or 5 times a power of ten.
    """
    if low == high:
        low, high = (low - abs(low) / 10, high + abs(high) / 10) if low else (0.0, 1.0)
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for distance in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.floor(low / distance + 1e-9), math.ceil(high / distance - 1e-9)
        if last - first <= most:
            break
    digits = max(0, -math.floor(math.log10(distance)))
    return [round(i * distance, digits) for i in range(first, last + 1)]


def shown(value: float) -> str:
    """A number in four digits, without zeros at its end."""
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def line_chart(
    labels: str,
    series: Sequence[Series],
    x_range: Span,
    x_label: str,
    y_label: str,
    *,
    shaded: Sequence[Span] = (),
    from_zero: bool = False,
    width: int = 540,
) -> str:
    """Lines over a common x axis; `legend` says which is which.

    Args:
        labels: `aria-labelledby`: the id of the element that holds the title.
        shaded: ranges of x that get a background.
        from_zero: whether the y axis includes 0.
        width: of the view box, in the units that text is 11 high in.
    """
    values = [y for one in series for _, y in one.points if math.isfinite(y)]
    y_ticks = ticks(min([*values, 0.0] if from_zero else values), max(values)) if values else [0.0, 1.0]
    plot = _Plot((_LEFT, width - _RIGHT), (_HEIGHT - _BOTTOM, _TOP), x_range, (y_ticks[0], y_ticks[-1]))
    parts = [_band(plot, span) for span in shaded]
    parts += [_y_axis(plot, y_ticks, y_label), _x_axis(plot, x_label)]
    parts += [*(_line(plot, one) for one in series), _tips(plot, series, x_label)]
    return _svg(labels, (width, _HEIGHT), _summary(series), parts)


def legend(series: Sequence[Series], shade_name: str = "") -> str:
    """Names of lines, and of the shaded ranges, beside how they are drawn: an HTML list, which wraps."""
    samples = [
        (f'<path class="line {one.style}" d="M0 6h24"/>{_mark(12, 6, one.style) if one.has_marks else ""}', one.name)
        for one in series
    ]
    if shade_name:
        samples.append(('<rect class="band" width="24" height="12"/>', shade_name))
    items = (
        f'<li><svg width="24" height="12" aria-hidden="true">{sample}</svg>{escape(name)}</li>'
        for sample, name in samples
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def heat_map(labels: str, rows: Sequence[Row], edges: Sequence[float], x_label: str, unit: str) -> str:
    """Cells by row and column, the darker the larger, with a scale. Shades follow the square root of the value, so that
    small ones differ too.

    Args:
        edges: of the columns on the x axis, ascending, one more than there are columns.
        unit: of the values, behind them.
    """
    left, first, step, width = 12 + _LETTER * max(len(row.name) for row in rows), 28, 15, 1100
    bottom = first + step * len(rows)
    plot = _Plot((left, width - _RIGHT), (bottom, first), (edges[0], edges[-1]), (0, 1))
    largest = max([value for row in rows for value in row.values if value is not None], default=0.0)
    parts = [_scale(largest, unit, left)]
    for i, row in enumerate(rows):
        top = first + step * i
        cells = []
        for value, (start, end) in zip(row.values, pairwise(edges)):
            if value is not None:
                tip = f"{shown(value)}{unit}, {x_label} {shown(end)}"
                cells.append(
                    f'<rect x="{plot.x(start):.1f}" y="{top}" width="{plot.x(end) - plot.x(start):.1f}" '
                    f'height="{step - 1}" fill-opacity="{_shade(value, largest):.2f}" data-tip="{escape(tip)}"/>'
                )
        name = escape(row.name)
        parts.append(f'<text class="end" x="{left - 6:.1f}" y="{top + 11}">{name}</text>')
        parts.append(f'<g class="cells" data-row="{name}">{"".join(cells)}</g>')
    summary = f"{len(rows)} rows, {len(edges) - 1} columns, values from 0 to {shown(largest)}{unit}"
    return _svg(labels, (width, bottom + _BOTTOM), summary, [*parts, _x_axis(plot, x_label)])


@dataclass(frozen=True)
class _Plot:
    """Where numbers lie: the corners of the plot in the view box, and what they stand for."""

    across: Span
    up: Span
    x_range: Span
    y_range: Span

    def x(self, value: float) -> float:
        return _place(value, self.x_range, self.across)

    def y(self, value: float) -> float:
        return _place(value, self.y_range, self.up)


def _place(value: float, values: Span, places: Span) -> float:
    return places[0] + (value - values[0]) / (values[1] - values[0]) * (places[1] - places[0])


def _svg(labels: str, size: tuple[int, int], summary: str, parts: Iterable[str]) -> str:
    attributes = f'role="img" aria-labelledby="{labels}" aria-describedby="{labels}-summary"'
    return (
        f'<svg {attributes} viewBox="0 0 {size[0]} {size[1]}">'
        f'<desc id="{labels}-summary">{escape(summary)}</desc>{"".join(parts)}</svg>'
    )


def _summary(series: Sequence[Series]) -> str:
    """What a reader who does not see the chart is told."""
    said = []
    for one in series:
        finite = [(x, y) for x, y in one.points if math.isfinite(y)]
        if finite:
            (first, start), (last, end) = finite[0], finite[-1]
            said.append(f"{one.name}: from {shown(start)} at {shown(first)} to {shown(end)} at {shown(last)}")
    return "; ".join(said) or "no numbers"


def _band(plot: _Plot, span: Span) -> str:
    start, end = (plot.x(value) for value in span)
    return f'<rect class="band" x="{start:.1f}" y="{_TOP}" width="{end - start:.1f}" height="{plot.up[0] - _TOP:.1f}"/>'


def _y_axis(plot: _Plot, values: Sequence[float], label: str) -> str:
    left, right = plot.across
    parts = [f'<text class="label" transform="translate(12 {sum(plot.up) / 2:.1f}) rotate(-90)">{escape(label)}</text>']
    for value in values:
        y = plot.y(value)
        parts.append(f'<path class="grid" d="M{left:.1f} {y:.1f}H{right:.1f}"/>')
        parts.append(f'<text class="end" x="{left - 6:.1f}" y="{y + 4:.1f}">{_tick(value)}</text>')
    return "".join(parts)


def _x_axis(plot: _Plot, label: str) -> str:
    (left, right), bottom = plot.across, plot.up[0]
    parts = [f'<path class="axis" d="M{left:.1f} {bottom:.1f}H{right:.1f}"/>']
    for value in ticks(*plot.x_range):
        if plot.x_range[0] <= value <= plot.x_range[1]:
            x = plot.x(value)
            parts.append(f'<path class="axis" d="M{x:.1f} {bottom:.1f}v4"/>')
            parts.append(f'<text class="middle" x="{x:.1f}" y="{bottom + 16:.1f}">{_tick(value)}</text>')
    place = f'x="{(left + right) / 2:.1f}" y="{bottom + 33:.1f}"'
    return "".join([*parts, f'<text class="label" {place}>{escape(label)}</text>'])


def _tick(value: float) -> str:
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e9 else f"{value:g}"


def _line(plot: _Plot, series: Series) -> str:
    parts = []
    for is_finite, group in groupby(series.points, lambda point: math.isfinite(point[1])):
        if is_finite:
            places = [(plot.x(x), plot.y(y)) for x, y in group]
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            parts.append(f'<path class="line {series.style}" d="M{path}"/>')
            if series.has_marks or len(places) == 1:
                parts += [_mark(x, y, series.style) for x, y in places]
    return "".join(parts)


def _mark(x: float, y: float, style: str) -> str:
    return f'<circle class="mark {style}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'


def _tips(plot: _Plot, series: Sequence[Series], x_label: str) -> str:
    """An invisible strip around every x, with the numbers that stand there."""
    found: dict[float, list[str]] = {}
    for one in series:
        for x, y in one.points:
            found.setdefault(x, []).append(f"{one.name}: {shown(y)}")
    places = sorted(found)
    borders = [plot.x_range[0], *((a + b) / 2 for a, b in pairwise(places)), plot.x_range[1]]
    strips = []
    for x, (start, end) in zip(places, pairwise(borders)):
        tip = "&#10;".join(map(escape, [f"{x_label} {shown(x)}", *found[x]]))
        strips.append(
            f'<rect x="{plot.x(start):.1f}" y="{_TOP}" width="{plot.x(end) - plot.x(start):.1f}" '
            f'height="{plot.up[0] - _TOP:.1f}" data-tip="{tip}"/>'
        )
    return f'<g class="tips">{"".join(strips)}</g>'


def _shade(value: float, largest: float) -> float:
    return 0.05 + 0.95 * math.sqrt(value / largest) if largest else 0.05


def _scale(largest: float, unit: str, left: float) -> str:
    """The shades of a heat map, with what they stand for."""
    parts, cell, count = [], 14, 20
    for i in range(count):
        shade = _shade((i / (count - 1)) ** 2, 1)
        parts.append(f'<rect x="{left + cell * i:.1f}" y="2" width="{cell}" height="8" fill-opacity="{shade:.2f}"/>')
    for part in (0, 1 / 3, 2 / 3, 1) if largest else (0,):
        x = left + cell / 2 + cell * (count - 1) * part
        said = escape(f"{largest * part**2:.2g}{unit}")
        parts.append(f'<text class="middle" x="{x:.1f}" y="21">{said}</text>')
    return f'<g class="scale">{"".join(parts)}</g>'
