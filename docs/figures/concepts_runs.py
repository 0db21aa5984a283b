"""Figures of the concept pages about a run: flip rates, masked decay and phases."""

import statistics

import sparse24_kernels as kernels
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from methods_runs import best_rate, search
from results import METHODS, draw_curve, every_run
from sparse24_kernels import nm_mask
from sparse24_kernels.masks import count_flips
from style import BLUE, GREEN, GREY, GRID, MUTED, ORANGE, PURPLE, bare, picture
from torch import Tensor

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


def toy_flip_rates(decay: float | None, steps: int = 240) -> list[float]:
    """Flip rates of a 64 x 64 linear layer that learns another one's outputs by Adam; decay None: a dense layer, and
    the mask that it would have. In fp64, so that no other machine rounds a mask differently."""
    draw = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw, dtype=torch.float64)

    target, weight = normal(64, 64), normal(64, 64) * 0.5
    first, second, mask = torch.zeros_like(weight), torch.zeros_like(weight), nm_mask(weight)
    rates = []
    for step in range(1, steps + 1):
        x, noise = normal(16, 64), normal(16, 64)
        used = weight if decay is None else weight * mask
        gradient = (x @ (used - target).t() + noise).t() @ x / 16
        if decay:
            kernels.masked_decay_(gradient, weight, mask, decay)
        first.lerp_(gradient, 0.1)
        second.lerp_(gradient**2, 0.05)
        rate = 4e-3 * min(1, step / 40)
        weight -= rate * (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
        before, mask = mask, nm_mask(weight)
        rates.append(count_flips([before], [mask]).item() / mask.numel())
    return rates


@picture(
    "flip-rate-decay",
    "A toy layer with a constant learning rate. Top: without decay masks flip more often than the would-be masks of a "
    "dense layer; with decay 2 somewhat less often; with decay 30 hardly at all in the warm-up. Bottom: the ratio mu "
    "of sparse and dense flip rates falls from 1.5 to 0 as the decay grows; 2 lies between 0.60 and 0.95",
    height=520,
)
def flip_rate_decay(figure: Figure) -> None:
    left, right = figure.subplots(2, 1)
    dense = toy_flip_rates(None)
    decays = (0, 0.1, 0.3, 1, 2, 5, 10, 30)
    rates = {decay: toy_flip_rates(decay) for decay in decays}
    for label, values, colour, line in [
        ("no decay", rates[0], ORANGE, "-"),
        ("dense", dense, MUTED, "--"),
        ("decay 2", rates[2], BLUE, "-"),
        ("decay 30", rates[30], PURPLE, "-"),
    ]:
        smooth = [statistics.mean(values[i : i + 20]) for i in range(0, len(values), 10) if i + 20 <= len(values)]
        left.plot([i * 10 + 10 for i in range(len(smooth))], smooth, line, color=colour, label=label)
    left.set(xlabel="step", ylabel="flip rate per step", ylim=(0, 0.0068), title="Flip rate of a toy layer")
    left.legend(ncols=2, columnspacing=1, loc="upper right")
    window = slice(30, 50)  # the end of the warm-up
    mu = [statistics.mean(rates[decay][window]) / statistics.mean(dense[window]) for decay in decays]
    right.axhspan(*FEASIBLE, color=GREEN, alpha=0.25, linewidth=0)
    right.text(0.012, statistics.mean(FEASIBLE), "feasible", color=GREEN, va="center")
    right.plot([max(decay, 0.03) for decay in decays], mu, "o-", color=BLUE)
    right.set(xscale="log", xlim=(0.01, 50), ylim=(0, 1.7), title="mu = sparse / dense", xlabel="decay (0 at the left)")
    right.set_xticks([0.03, 0.1, 1, 10], ["0", "0.1", "1", "10"])
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
