"""Figures of the concept pages about a run: flip rates, masked decay and phases."""

import statistics

import claims_page
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from methods_runs import best_rate, search
from results import METHODS, RESULTS, draw_curve, every_run
from style import BLUE, GREEN, GREY, GRID, MUTED, ORANGE, PURPLE, bare, picture

from hf_sparse24 import Sparse24Config
from hf_sparse24.run import SparseRun
from hf_sparse24.training.decay_search import FEASIBLE

# Flip rate and masked decay


@picture(
    "flip-rate",
    "Flip rate per step of a small Llama with ste, which has no masked decay, and with sr-ste, which has, both at the "
    "same learning rate",
    height=270,
)
def flip_rates(figure: Figure) -> None:
    axis = figure.subplots()
    tried = [search(every_run(), variant) for variant in ("ste", "sr-ste")]
    # Flips grow with the learning rate, so both have one: the best for the two together.
    if both := {rate: loss + tried[1][rate] for rate, loss in tried[0].items() if rate in tried[1]}:
        rate = best_rate(both)
        for variant, colour, label, line in [
            ("ste", MUTED, "ste: no decay", "--"),
            ("sr-ste", BLUE, "sr-ste: decay 2e-4", "-"),
        ]:
            runs = [run for run in every_run() if (run["variant"], run["learning_rate"]) == (variant, rate)]
            draw_curve(axis, {run["seed"]: run for run in runs if run["seed"] == 0}, "flip_rate", colour, label, line)
        axis.legend()
        axis.set(title=f"Learning rate {rate:g}, seed 0")
    axis.set(xlabel="step", ylabel="flip rate per step", ylim=(0, None))


@picture(
    "flip-rate-decay",
    "t-sr-ste by its decay. Top: without decay masks flip more often than the would-be masks of a dense model; with "
    "decay 0.006 somewhat less often; with 0.06 hardly at all. Bottom: the ratio mu of sparse and dense flip rates at "
    "the end of the warm-up falls from 1.3 to 0 as the decay grows; only 0.006 lies between 0.60 and 0.95",
    height=520,
)
def flip_rate_decay(figure: Figure) -> None:
    left, right = figure.subplots(2, 1)
    results = claims_page.Results(RESULTS)
    runs = {decay: results.runs(f"claims/t-sr-ste-gradient-{decay:g}") for decay in (0, 6e-4, 6e-3, 0.02, 0.06, 0.2)}
    dense = results.runs("claims/dense")
    for decay, colour in [(0, ORANGE), (6e-3, BLUE), (0.06, PURPLE)]:
        draw_curve(left, {0: runs[decay][0]}, "flip_rate", colour, f"decay {decay:g}", "-")
    draw_curve(left, {0: dense[0]}, "flip_rate", MUTED, "dense", "--")
    left.set(xlabel="step", ylabel="flips in 40 steps", ylim=(0, None), title="A Llama of 0.46M parameters, seed 0")
    left.legend()
    warm = dense[0]["steps"].index(80)
    mu = [run[0]["flip_rate"][warm] / dense[0]["flip_rate"][warm] for run in runs.values()]
    right.axhspan(*FEASIBLE, color=GREEN, alpha=0.25, linewidth=0)
    right.text(0.03, statistics.mean(FEASIBLE), "feasible", color=GREEN, va="center")
    right.plot([max(decay, 2e-4) for decay in runs], mu, "o-", color=BLUE)
    right.set(xscale="log", ylim=(0, 1.5), title="mu = sparse / dense, step 80", xlabel="decay (0 at the left)")
    right.set_xticks([2e-4, 1e-3, 1e-2, 0.1], ["0", "0.001", "0.01", "0.1"])
    right.minorticks_off()


# Phases


@picture(
    "phases",
    "When each method is sparse in a run of 300 steps with default settings: s-ste, sr-ste, ste, fixed-mask and "
    "slope throughout; t-sr-ste for five sixths, with a mask refresh every 40 steps, then dense; "
    "step dense until its switch, which comes between 10 and 50 percent",
    height=420,
)
def phases(figure: Figure) -> None:
    axis, total = figure.subplots(), 300
    bare(axis)
    for y, name in enumerate(METHODS):
        method = SparseRun(Sparse24Config(method=name)).method
        sparse = method.schedule(total)
        tail = min(sparse.stop, total)
        _phase(axis, y, 0, sparse.start, "dense")
        _phase(axis, y, sparse.start, tail, "sparse")
        _phase(axis, y, tail, total, "dense")
        if name == "step":
            earliest = method.settings.switch_after * total
            axis.plot([earliest, sparse.start], [y + 0.5] * 2, color=PURPLE, linewidth=3)
            axis.text(sparse.start + 4, y + 0.5, "range of the switch", color=PURPLE, fontsize=11.5, va="center")
        if name == "t-sr-ste":
            refreshes = [step for step in range(1, tail) if method.refreshes_state(step, total)]
            axis.plot(refreshes, [y - 0.37] * len(refreshes), "v", color=ORANGE, markersize=7)
            axis.text(refreshes[-1] + 10, y - 0.45, "mask refresh", color=ORANGE, fontsize=11.5, va="center")
        axis.text(-6, y, name, ha="right", va="center")
    axis.set(xlim=(-58, total + 2), ylim=(len(METHODS) + 0.1, -0.6))
    for fraction in (0, 0.1, 0.5, 5 / 6, 1):
        axis.axvline(fraction * total, ymin=0.07, color=GRID, linewidth=1, zorder=0)
        axis.text(fraction * total, len(METHODS) - 0.1, f"{fraction:.0%}", ha="center", color=MUTED, fontsize=12)


def _phase(axis: Axes, y: int, start: int, end: int, phase: str) -> None:
    if end > start:
        colour, alpha = (BLUE, 0.55) if phase == "sparse" else (GREY, 0.3)
        axis.add_patch(Rectangle((start, y - 0.27), end - start, 0.54, facecolor=colour, alpha=alpha))
        axis.text((start + end) / 2, y, phase, ha="center", va="center", fontsize=12)
