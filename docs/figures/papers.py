"""Figures of the page of claims, one for each paper, from recipes/results/claims."""

import statistics
from functools import cache
from math import comb, log10

from claims_page import Results, Run
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from methods_runs import gaps
from results import RESULTS
from style import BLUE, GREEN, GREY, MUTED, ORANGE, PURPLE, picture


@cache
def results() -> Results:
    return Results(RESULTS)


def _bars(axis: Axes, rows: dict[str, list[float]]) -> None:
    """A mean with its range for each row, from top to bottom, and a line at zero."""
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
    return next(section.alt for section in results().sections() if section.image == image)


def _by_scale() -> dict[float, float]:
    """Loss of seed 0 by fixed scale; that of the least-squares rule is the mean of the layers' scales."""
    names = {0.5: "s-ste-scale-0.5", 1.0: "s-ste-none", 2.0: "s-ste-scale-2", 3.0: "s-ste-scale-3"}
    runs = {scale: results().short(name)[0] for scale, name in names.items()}
    own = results().short("s-ste")[0]
    runs[statistics.mean(own["scales"])] = own
    return {scale: runs[scale]["eval_loss"] for scale in sorted(runs)}


@picture("claims-s-ste", _alt("claims-s-ste"), height=480)
def s_ste(figure: Figure) -> None:
    upper, lower = figure.subplots(2, 1, height_ratios=(1, 1.5))
    upper.plot(*zip(*_by_scale().items()), "o-", color=BLUE)
    upper.set(xlabel="fixed scale, 1 seed", ylabel="validation loss")
    own = results().short("s-ste")
    names = {"rule: none": "s-ste-none", "rule: l1": "s-ste-l1", "recomputed scale": "s-ste-moving"}
    names |= {"no MVUE": "s-ste-no-mvue", "FP8": "s-ste-fp8"}
    _bars(lower, {label: gaps(own, results().short(name)) for label, name in names.items()})
    lower.set(xlabel="loss over s-ste, nats")


DECAYS = {"gradient": (0.0, 6e-5, 6e-4, 6e-3, 2e-2, 6e-2, 2e-1), "weight": (6e-3, 1e-1, 1.0, 10.0)}


def _by_decay(on: str) -> dict[float, Run]:
    """The runs of `t-sr-ste` of seed 0 by masked decay; that of 6e-5 on the gradient is the default."""
    names = {decay: "t-sr-ste" if decay == 6e-5 else f"t-sr-ste-{on}-{decay:g}" for decay in DECAYS[on]}
    return {decay: results().short(name)[0] for decay, name in names.items()}


@picture("claims-t-sr-ste", _alt("claims-t-sr-ste"), height=560)
def t_sr_ste(figure: Figure) -> None:
    upper, lower = figure.subplots(2, 1)
    runs = _by_decay("gradient")
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
        found = {decay: run["eval_loss"] for decay, run in _by_decay(on).items() if decay}
        lower.plot(*zip(*found.items()), "o-", color=colour, label=f"on the {on}")
    lower.axhline(runs[0.0]["eval_loss"], color=MUTED, linewidth=1, linestyle="--", label="none")
    lower.set(xscale="log", xlabel="masked decay", ylabel="validation loss, 1 seed")
    _log_ticks(lower, "x", (1e-4, 1e-3, 0.01, 0.1, 1, 10))
    lower.legend()


_WHEN = {
    "loss": ("at once", ORANGE),
    "adaprune": ("after AdaPrune", BLUE),
    "retrained": ("and 100 steps of training, as dense", GREEN),
}
MASKS = ("1:2 transposable", "1:2", "2:4 transposable", "2:4", "4:8 transposable", "4:8", "8:16", "unstructured")
"""Half of the weights kept, by ways that `claims.py` tries."""


TRANSPOSABLE = {"1:2": 2, "2:4": 90, "4:8": 116_963_796_250}
"""How many tiles of M x M have N ones in every row and column, counted exactly."""


def _diversity(kind: str, size: int = 256) -> float:
    """log10 of the number of masks that a block of so many weights has."""
    if kind == "unstructured":
        return log10(comb(size, size // 2))
    pattern = kind.split()[0]
    n, m = map(int, pattern.split(":"))
    return size // m**2 * log10(TRANSPOSABLE[pattern]) if "transposable" in kind else size // m * log10(comb(m, n))


def _lost_by(kind: str, when: str) -> float:
    """Mean loss over dense of a mask put on a trained model: at once, after AdaPrune, or after training of both."""
    rows = [run["rows"] for run in results().short("one-shot").values()]
    dense = "retrained" if when == "retrained" else "loss"
    return statistics.mean(row[kind][when] - row["dense"][dense] for row in rows)


@picture("claims-masks", _alt("claims-masks"), height=420)
def diversity(figure: Figure) -> None:
    axis = figure.subplots()
    places = {kind: _diversity(kind) for kind in MASKS}
    for when, (label, colour) in _WHEN.items():
        points = [(count, _lost_by(kind, when)) for kind, count in places.items()]
        axis.plot(*zip(*sorted(points)), "o-", color=colour, label=label)
    for kind, count in places.items():
        place = (count, _lost_by(kind, "loss"))
        both_ways = kind.replace(" transposable", ", both ways")
        axis.annotate(both_ways, place, (4, 5), textcoords="offset points", fontsize=11.5, color=MUTED, rotation=25)
    axis.set(xlabel="log10 of the number of masks of 256 weights", ylabel="loss over dense, nats")
    axis.margins(x=0.16, y=0.12)
    figure.legend(loc="outside lower center")


@picture("claims-mvue", _alt("claims-mvue"), height=380)
def mvue(figure: Figure) -> None:
    dense = results().short("dense")
    names = {"2:4 exact": "mvue", "2:4 approximate": "mvue-approx", "1:2": "mvue-1-2", "2:4 two largest": "greedy"}
    names |= {"2:4, both GEMMs": "mvue-both", "2:4 and FP8": "mvue-fp8"}
    names |= {"X: two largest": "activations-mse", "X: MVUE": "activations-mvue"}
    axis = figure.subplots()
    _bars(axis, {label: gaps(dense, results().short(name)) for label, name in names.items()})
    axis.set(xlabel="loss over dense, nats")


RATIOS = ("2:4", "1:4", "1:8", "1:16")
WAYS = {"step": BLUE, "sr-ste": PURPLE, "ste": ORANGE, "asp": GREEN, "ste-late": GREY}


@picture("claims-step", _alt("claims-step"), height=600)
def step(figure: Figure) -> None:
    upper, lower = figure.subplots(2, 1)
    dense = results().short("dense")
    for way, colour in WAYS.items():
        losses = [gaps(dense, results().short(f"{way}-{ratio.replace(':', '-')}"))[0] for ratio in RATIOS]
        upper.plot(RATIOS, losses, "o-", color=colour, label=way)
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
