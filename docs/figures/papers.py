"""Figures of the page of claims, one for each paper, from recipes/results/claims."""

import statistics
from functools import cache

import claims_masks as masks
import claims_thresholds as thresholds
from claims_page import Results, Run, gaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from results import RESULTS
from style import BLUE, GREEN, GREY, MUTED, ORANGE, PURPLE, picture


@cache
def results() -> Results:
    return Results(RESULTS)


def _bars(axis: Axes, rows: dict[str, list[float]]) -> None:
    """A mean with its range for each row, from top to bottom, and a line at zero."""
    rows = {label: values for label, values in rows.items() if values}  # of runs that are there
    for place, values in enumerate(rows.values()):
        axis.plot([min(values), max(values)], [place, place], color=BLUE, linewidth=3)
        axis.plot(statistics.mean(values), place, "o", color=BLUE, markersize=7)
    axis.axvline(0, color=MUTED, linewidth=1)
    axis.set_yticks(range(len(rows)), rows)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)


def _log_ticks(axis: Axes, which: str, ticks: tuple[float, ...]) -> None:
    """Ticks of a logarithmic axis as plain numbers: exponents would be too small on a phone."""
    getattr(axis, f"set_{which}ticks")(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()


def _alt(image: str) -> str:
    papers = (*thresholds.PAPERS, *masks.PAPERS)
    return next(paper.alt for paper in papers if paper.image == image)


@picture("claims-s-ste", _alt("claims-s-ste"), height=480)
def s_ste(figure: Figure) -> None:
    upper, lower = figure.subplots(2, 1, height_ratios=(1, 1.5))
    losses = thresholds.by_scale(results())
    upper.plot(*zip(*sorted(losses.items())), "o-", color=BLUE)
    upper.set(xlabel="fixed scale, 1 seed", ylabel="validation loss")
    own = results().short("s-ste")
    names = {"rule: none": "s-ste-none", "rule: l1": "s-ste-l1", "recomputed scale": "s-ste-moving"}
    names |= {"no MVUE": "s-ste-no-mvue", "FP8": "s-ste-fp8"}
    _bars(lower, {label: gaps(own, results().short(name, False)) for label, name in names.items()})
    lower.set(xlabel="loss over s-ste, nats")


@picture("claims-t-sr-ste", _alt("claims-t-sr-ste"), height=560)
def t_sr_ste(figure: Figure) -> None:
    upper, lower = figure.subplots(2, 1)
    runs = thresholds.by_decay(results())
    drawn = {"dense": (results().short("dense")[0], GREY)}
    colours = dict(zip((0.0, 6e-4, 6e-3, 6e-2), (ORANGE, PURPLE, BLUE, GREEN)))
    drawn |= {f"decay {decay:g}": (runs[decay], colour) for decay, colour in colours.items()}
    for label, (run, colour) in drawn.items():
        points = [(step, rate) for step, rate in zip(run["steps"], run["flip_rate"]) if rate]
        upper.plot(*zip(*points), color=colour, label=label, linestyle="--" if label == "dense" else "-")
    upper.set(xlabel="step", ylabel="flip rate per 40 steps", yscale="log")
    _log_ticks(upper, "y", (0.01, 0.03, 0.1, 0.3))
    upper.legend(ncols=2)
    for on, colour in {"gradient": BLUE, "weight": ORANGE}.items():
        found = {decay: run["eval_loss"] for decay, run in thresholds.by_decay(results(), on).items() if decay}
        lower.plot(*zip(*found.items()), "o-", color=colour, label=f"on the {on}")
    lower.axhline(runs[0.0]["eval_loss"], color=MUTED, linewidth=1, linestyle="--", label="none")
    lower.set(xscale="log", xlabel="masked decay", ylabel="validation loss, 1 seed")
    _log_ticks(lower, "x", (1e-4, 1e-3, 0.01, 0.1, 1, 10))
    lower.legend()


@picture("claims-masks", _alt("claims-masks"), height=420)
def diversity(figure: Figure) -> None:
    axis = figure.subplots()
    for when, (label, colour) in _WHEN.items():
        points = [(masks.diversity(kind), masks.lost_by(kind, when, results())) for kind in masks.MASKS]
        means = [(place, statistics.mean(lost)) for place, lost in sorted(points)]
        axis.plot(*zip(*means), "o-", color=colour, label=label)
    for kind in masks.MASKS:
        place = (masks.diversity(kind), statistics.mean(masks.lost_by(kind, "loss", results())))
        both_ways = kind.replace(" transposable", ", both ways")
        axis.annotate(both_ways, place, (4, 5), textcoords="offset points", fontsize=11.5, color=MUTED, rotation=25)
    axis.set(xlabel="log10 of the number of masks of 256 weights", ylabel="loss over dense, nats")
    axis.margins(x=0.16, y=0.12)
    figure.legend(loc="outside lower center")


_WHEN = {
    "loss": ("at once", ORANGE),
    "adaprune": ("after AdaPrune", BLUE),
    "retrained": ("and 100 steps of training, as dense", GREEN),
}


@picture("claims-mvue", _alt("claims-mvue"), height=380)
def mvue(figure: Figure) -> None:
    dense = results().short("dense")
    names = {"2:4 exact": "mvue", "2:4 approximate": "mvue-approx", "1:2": "mvue-1-2", "2:4 two largest": "greedy"}
    names |= {"2:4, both GEMMs": "mvue-both", "2:4 and FP8": "mvue-fp8"}
    names |= {"X: two largest": "activations-mse", "X: MVUE": "activations-mvue"}
    axis = figure.subplots()
    _bars(axis, {label: gaps(dense, results().short(name, False)) for label, name in names.items()})
    axis.set(xlabel="loss over dense, nats")


WAYS = {"step": BLUE, "sr-ste": PURPLE, "ste": ORANGE, "asp": GREEN, "ste-late": GREY}


@picture("claims-step", _alt("claims-step"), height=600)
def step(figure: Figure) -> None:
    upper, lower = figure.subplots(2, 1)
    dense = results().short("dense")
    for way, colour in WAYS.items():
        found = masks.by_ratio(results(), way)
        means = [gaps(dense, runs)[0] for runs in found.values()]
        upper.plot(masks.RATIOS, means, "o-", color=colour, label=way)
    upper.axhline(0, color=MUTED, linewidth=1)
    upper.set(xlabel="ratio", ylabel="loss over dense, nats, seed 0")
    upper.legend(ncols=2)
    names = {"dense": GREY, "sr-ste-2-4": GREEN, "sr-ste-1-16": PURPLE, "step-1-16": BLUE}
    for name, colour in names.items():
        run: Run = results().short(name)[0]
        points = [(at, typical) for at, _, typical in run["variance"]]
        lower.plot(*zip(*points), color=colour, label=name, linestyle="--" if name == "dense" else "-")
    lower.set(xlabel="step", ylabel="second moment, geometric mean", yscale="log")
    _log_ticks(lower, "y", (1e-8, 1e-7, 1e-6))
    lower.legend(ncols=2)
