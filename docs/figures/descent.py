"""Figures of `recipes/analysis.py`: predicted and actual descent, what flips do to it, and which tiles flip."""

import json
import pathlib
from functools import cache
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from style import BLUE, GREEN, GREY, INK, MUTED, ORANGE, PURPLE, picture

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "recipes" / "results" / "analysis.json"
LOOKS = {"dense": (GREY, "--"), "ste": (ORANGE, "-"), "sr-ste": (PURPLE, "-"), "s-ste": (BLUE, "-")}
FLIPS = LOOKS | {"t-sr-ste": (GREEN, "-")}
TILES = {"dense": "dense, virtual", "t-sr-ste": "t-sr-ste, decay 6e-5", "t-sr-ste-6e-3": "t-sr-ste, decay 6e-3"}
SEED = 0
WIDTH = 420  # that of a phone, so that text stays as large there


@cache
def run(variant: str) -> dict[str, Any]:
    runs = json.loads(RESULTS.read_text())["runs"]
    return next(run for run in runs if (run["variant"], run["seed"]) == (variant, SEED))


def _dots(axis: Axes, x: list[float], y: list[float], colour: str, size: float = 3.2) -> None:
    """Points, as one path of strokes without length: a fifth of the size that as many markers have in SVG."""
    ends = [point for point in zip(x, y) for _ in range(2)]
    path = Path([*ends], [Path.MOVETO, Path.LINETO] * len(x))
    path.should_simplify = False
    look = {"edgecolor": colour, "linewidth": size, "capstyle": "round", "alpha": 0.55}
    axis.add_patch(PathPatch(path, facecolor="none", **look))
    axis.autoscale_view()


def _diagonal(axis: Axes, low: float, high: float) -> None:
    axis.plot([low, high], [low, high], color=INK, linewidth=1, zorder=0.9)
    axis.set(xlim=(low, high), ylim=(low, high))
    axis.locator_params(nbins=4)


@picture(
    "descent-predicted",
    "Actual against predicted descent of the loss of the batch of each measured step, for dense training, ste and "
    "s-ste, with the diagonal; and the share of steps whose actual descent is at most x",
    WIDTH,
    440,
)
def predicted(figure: Figure) -> None:
    axes = figure.subplots(2, 2)
    points = {variant: run(variant)["points"] for variant in LOOKS}
    values = [v for p in points.values() for key in ("predicted", "actual") for v in p[key]]
    for axis, variant in zip(axes.flat, ("dense", "ste", "s-ste")):
        _dots(axis, points[variant]["predicted"], points[variant]["actual"], LOOKS[variant][0])
        _diagonal(axis, min(values), max(values))
        axis.set(title=variant, xlabel="predicted descent")
    for axis in axes[:, 0]:
        axis.set(ylabel="actual descent")
    for variant in ("dense", "ste", "s-ste"):
        colour, line = LOOKS[variant]
        sorted_values = sorted(points[variant]["actual"])[::3]
        shares = [(i + 1) / len(sorted_values) for i in range(len(sorted_values))]
        axes[1, 1].plot(sorted_values, shares, line, color=colour, label=variant, linewidth=1.8)
    axes[1, 1].set(title="steps up to x", xlabel="actual descent")
    axes[1, 1].legend(loc="lower right")


@picture(
    "descent-flips",
    "Change of the loss when weights and masks are updated against the change when the mask of before is held, for "
    "ste, t-sr-ste and s-ste: points of s-ste lie on the diagonal",
    WIDTH,
    210,
)
def flips(figure: Figure) -> None:
    axes = figure.subplots(1, 3, sharey=True)
    points = {variant: run(variant)["points"] for variant in ("ste", "t-sr-ste", "s-ste")}
    values = [-v for p in points.values() for key in ("held", "actual") for v in p[key]]
    for axis, (variant, found) in zip(axes, points.items()):
        _dots(axis, [-v for v in found["held"]], [-v for v in found["actual"]], FLIPS[variant][0])
        _diagonal(axis, min(values), max(values))
        axis.set(title=variant, xlabel="mask held", xticks=[-0.1, 0], yticks=[-0.1, 0])
    axes[0].set(ylabel="mask updated")


@picture(
    "flips-by-gap",
    "How often the mask of a 4 x 4 tile flipped against the gap in L1 norm between its best and second best pattern, "
    "for dense training with virtual masks and t-sr-ste with two decays; a line through the means of tenths",
    WIDTH,
    420,
)
def by_gap(figure: Figure) -> None:
    axes = figure.subplots(3, 1, sharex=True, sharey=True)
    for axis, (variant, label) in zip(axes, TILES.items()):
        found = run(variant)["tiles"]
        _dots(axis, *zip(*found["some"][::2]), GREY if variant == "dense" else GREEN)
        axis.plot(*zip(*found["tenths"]), "o-", color=INK, linewidth=1.6, markersize=4)
        axis.set(title=label, xscale="log")
        axis.xaxis.set_major_formatter("{x:g}")  # exponents would be too small to read
    axes[1].set(ylabel="flips of a tile's 16 entries")
    axes[2].set(xlabel="L1 gap of the tile at the end")


@picture(
    "flips-dense",
    "Flip rate by step: of dense training with virtual masks next to ste, sr-ste and s-ste, per step; and with virtual "
    "transposable masks next to t-sr-ste with two decays, per refresh",
    WIDTH,
    440,
)
def rates(figure: Figure) -> None:
    rows, tiles = figure.subplots(2, 1)
    for variant, (colour, line) in LOOKS.items():
        found = run(variant)["points"]
        rows.plot(*_smooth(found["step"], found["flip_rate"]), line, color=colour, label=variant, linewidth=1.8)
    for (variant, label), colour, line in zip(TILES.items(), (GREY, GREEN, MUTED), ("--", "-", ":")):
        rates = run(variant)["tiles"]["flip_rates"]
        tiles.plot(*zip(*rates), line, color=colour, label=label, linewidth=1.8)
    rows.set(title="2:4 by rows: flip rate per step", ylim=(0, None))
    tiles.set(title="Transposable: per refresh of 40 steps", xlabel="step", ylim=(0, None))
    rows.legend()
    tiles.legend()


def _smooth(steps: list[int], values: list[float], width: int = 5) -> tuple[list[int], list[float]]:
    """Means of so many neighbours."""
    chunks = range(0, len(values) - width + 1, width)
    return [steps[i + width // 2] for i in chunks], [sum(values[i : i + width]) / width for i in chunks]
