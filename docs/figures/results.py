"""Figures of committed results: recipes/results.

Of `recipes/methods.py` any runs may be there; what has none is left out.
"""

import json
import statistics
from functools import cache, partial
from pathlib import Path

import methods_runs
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sparse24_kernels import nm_prune
from style import BLUE, GREEN, GREY, INK, MUTED, ORANGE, PURPLE, arrow, cells, matrix, picture

RESULTS = Path(__file__).resolve().parents[2] / "recipes" / "results"
METHODS = ("s-ste", "t-sr-ste", "sr-ste", "step", "fixed-mask", "ste")
VARIANTS = {
    "s-ste": "s-ste",
    "s-ste-no-mvue": "s-ste without MVUE",
    "t-sr-ste": "t-sr-ste",
    "t-sr-ste-no-tail": "t-sr-ste without tail",
    "sr-ste": "sr-ste",
    "step": "step",
    "fixed-mask": "fixed-mask",
    "fixed-mask-late": "fixed-mask, late",
    "ste": "ste",
}
"""What `recipes/methods.py` calls them, and what figures do."""


@cache
def _read(directory: Path) -> list[methods_runs.Run]:
    return methods_runs.read_runs(directory)


def every_run() -> list[methods_runs.Run]:
    return _read(RESULTS / "methods")


def best(variant: str) -> dict[int, methods_runs.Run]:
    """The runs at the variant's best learning rate, by seed."""
    return methods_runs.best_runs(every_run(), variant)


def over_dense(variant: str) -> list[float]:
    """Validation loss over that of the dense run, seed by seed."""
    return methods_runs.gaps(best("dense"), best(variant))


def the_model() -> str:
    """What all runs trained, for titles."""
    found = every_run()
    if not found:
        return "small Llama"
    return f"Llama, {found[0]['parameters'] / 1e6:.1f}M parameters, {found[0]['tokens'] / 1e6:.1f}M tokens"


def draw_curve(
    axis: Axes,
    found: dict[int, methods_runs.Run],
    key: str,
    colour: str,
    label: str,
    line: str = "-",
    steps_of: str = "default",
) -> None:
    """Mean over seeds of what was logged, and the range; steps without a value left out."""
    _draw_band(axis, methods_runs.curve(found, key), colour, label, line, steps_of)


def _draw_band(
    axis: Axes, points: list[tuple[int, tuple[float, ...]]], colour: str, label: str, line: str, steps_of: str
) -> None:
    if not points:
        return
    steps = [step for step, _ in points]
    means, lowest, highest = ([of(values) for _, values in points] for of in (statistics.mean, min, max))
    axis.plot(steps, means, line, color=colour, label=label, drawstyle=steps_of, linewidth=1.6)
    step = None if steps_of == "default" else steps_of.removeprefix("steps-")
    axis.fill_between(steps, lowest, highest, color=colour, alpha=0.2, linewidth=0, step=step)


def _legend(axis: Axes, **options: object) -> None:
    """A legend, where there is something to explain."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(**options)


def _with_loss(variant: str) -> str:
    losses = [run["eval_loss"] for run in best(variant).values()]
    if not losses:
        return variant
    return f"{variant}: {statistics.mean(losses):.2f} [{min(losses):.2f}, {max(losses):.2f}]"


@picture(
    "hero",
    "Left: an 8 x 8 weight matrix, dense and 2:4, where two of every four values in a row are blank. Right: training "
    "loss of a small Llama, dense and s-ste, each at its best learning rate",
    660,
    290,
)
def hero(figure: Figure) -> None:
    left, right = figure.subplots(1, 2, width_ratios=[1.12, 1])
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(4))
    cells(left, 19.5, 12.6, left=-0.2, top=-2.6)
    for x, values, title in [(0, weight, "dense"), (10.1, nm_prune(weight), "2:4 sparse")]:
        matrix(left, values.tolist(), 2.2, (x, 0))
        left.text(x + 4.17, -0.55, title, ha="center", weight="bold", fontsize=14)
    arrow(left, (8.6, 4), (9.85, 4), INK)
    left.text(0, 9.2, "Of every four neighbours in a row,", fontsize=13, color=INK, va="center")
    left.text(0, 10.2, "the two smaller become zero.", fontsize=13, va="center")
    for variant, colour, line in [("dense", MUTED, "--"), ("s-ste", BLUE, "-")]:
        draw_curve(right, best(variant), "loss", colour, _with_loss(variant), line)
    right.set(xlabel="step", ylabel="training loss", title="Llama, each at its best rate", ylim=(None, 8))
    _legend(right, title="validation loss", title_fontsize=12.5, alignment="left")


@picture(
    "methods",
    "Validation loss over the dense control for the methods and their variants, each at its best learning rate: a tick "
    "for each seed, a dot for their mean",
    600,
    340,
)
def methods(figure: Figure) -> None:
    axis = figure.subplots()
    compared = {variant: values for variant in VARIANTS if (values := over_dense(variant))}
    for row, (variant, values) in enumerate(compared.items()):
        _dots(axis, values, row, BLUE if variant in METHODS else GREY)
        axis.text(1.02, row, f"{statistics.mean(values):+.3f}", transform=axis.get_yaxis_transform(), va="center")
    axis.axvline(0, color=MUTED, linestyle="--", linewidth=1.4)
    axis.set(
        yticks=range(len(compared)),
        ylim=(max(len(compared), 1) - 0.5, -0.5),
        xlabel="validation loss over dense, nats per token; a tick is a seed",
        title=the_model(),
    )
    axis.set_yticklabels(VARIANTS[variant] for variant in compared)
    for tick, variant in zip(axis.get_yticklabels(), compared):
        tick.set_color(INK if variant in METHODS else MUTED)
    axis.grid(axis="y", visible=False)


@picture(
    "rates",
    "Validation loss of seed 0 against the learning rate, for dense training, emphasised, the methods and their "
    "variants",
    600,
    400,
)
def rates(figure: Figure) -> None:
    axis = figure.subplots()
    _draw_search(axis, "dense", INK, "dense", "o-", linewidth=4, markersize=9)
    looks = zip(VARIANTS.items(), (BLUE, BLUE, ORANGE, ORANGE, GREEN, PURPLE, GREY, GREY, MUTED), "sDsDs^vD^")
    for (variant, label), colour, marker in looks:
        _draw_search(axis, variant, colour, label, f"{marker}{'-' if variant in METHODS else ':'}", linewidth=1.6)
    _rate_axis(axis)
    axis.set(ylabel="validation loss, seed 0", title=the_model())
    if handles := axis.get_legend_handles_labels()[0]:
        figure.legend(handles=handles, loc="outside right upper")


def _draw_search(axis: Axes, variant: str, colour: str, label: str, line: str = "o-", **look: float) -> None:
    losses = methods_runs.search(every_run(), variant)
    if losses:
        axis.plot(losses.keys(), losses.values(), line, color=colour, label=label, **look)


def _rate_axis(axis: Axes) -> None:
    """A logarithmic axis of the learning rates that were tried."""
    tried = sorted({run["learning_rate"] for run in every_run()})
    axis.set(xscale="log", xlabel="learning rate, in thousandths")
    axis.set_xticks(tried, [f"{rate * 1000:g}" for rate in tried])
    axis.minorticks_off()


@picture(
    "curves",
    "Training loss over the dense control, step by step, after the first quarter of the run, for the methods "
    "and their variants, each at its best learning rate",
    600,
    560,
)
def curves(figure: Figure) -> None:
    axes = figure.subplots(3, 3, sharex=True, sharey=True)
    gaps = {variant: methods_runs.training_gaps(best(variant), best("dense")) for variant in VARIANTS}
    compared = {variant: points for variant, points in gaps.items() if points}
    for axis, (variant, points) in zip(axes.flat, compared.items()):
        _draw_band(axis, points, BLUE if variant in METHODS else GREY, variant, "-", "default")
        axis.axhline(0, color=MUTED, linestyle="--", linewidth=1.2)
        _shade_dense(axis, variant, "")
        axis.set_title(VARIANTS[variant], fontsize=12.5)
    for axis in axes.flat[len(compared) :]:
        axis.set_visible(False)
    axes[0, 0].locator_params(nbins=3)
    for axis in axes[2]:
        axis.set(xlabel="step")
    axes[1, 0].set(ylabel="training loss over dense, nats per token")


def _dots(axis: Axes, values: list[float], y: float, colour: str) -> None:
    """The range of seeds as a line, each seed as a tick, the mean as a dot."""
    axis.plot([min(values), max(values)], [y, y], color=colour, linewidth=1.8)
    axis.plot(values, [y] * len(values), "|", color=colour, markersize=9, markeredgewidth=1.6)
    axis.plot(statistics.mean(values), y, "o", color=colour, markersize=8)


def method(name: str, figure: Figure) -> None:
    """Loss, search of the learning rate, flip rate and step time of one method beside the dense control."""
    top, middle, bottom = figure.subfigures(3, 1, height_ratios=[1, 0.75, 0.62])
    loss, search = top.subplots(1, 2)
    for variant, colour, line in [("dense", MUTED, "--"), (name, BLUE, "-")]:
        draw_curve(loss, best(variant), "loss", colour, _with_loss(variant), line)
        _draw_search(search, variant, colour, variant, f"o{line}")
    loss.set(title="Training loss", xlabel="step", ylim=(None, 8))
    _shade_dense(loss, name)
    _legend(loss, loc="upper right", title="validation loss", title_fontsize=12.5, alignment="left")
    search.set(title="Validation loss by learning rate")
    _rate_axis(search)
    _legend(search)

    flips = middle.subplots()
    draw_curve(flips, best(name), "flip_rate", BLUE, name, steps_of="steps-post" if name == "t-sr-ste" else "default")
    flips.set(title=f"Flip rate, per {'refresh' if name == 't-sr-ste' else 'step'}", xlabel="step")
    _shade_dense(flips, name)
    flips.set_ylim(0, None if name != "fixed-mask" else 0.01)
    if name == "fixed-mask":
        flips.text(0.5, 0.5, "zero: the mask is kept", ha="center", va="center", transform=flips.transAxes)

    times = bottom.subplots()
    rows = json.loads((RESULTS / "cpu_step_time.json").read_text())["rows"]
    labels = {"gpt2-124m": "GPT-2 124M", "llama-quickstart": "small Llama"}
    for y, row in enumerate(row for row in rows if row["method"] == name):
        times.plot([row["ratio_min"], row["ratio_max"]], [y, y], color=(GREEN, PURPLE)[y], linewidth=2)
        times.plot(row["ratio"], y, "o", color=(GREEN, PURPLE)[y], markersize=8)
        times.text(row["ratio_max"] + 0.02, y, f"{row['ratio']:.2f}", va="center", color=(GREEN, PURPLE)[y])
    times.axvline(1, color=MUTED, linestyle="--", linewidth=1.4)
    times.set(yticks=[0, 1], ylim=(1.5, -0.6), xlim=(0.6, 1.7))
    times.set(title="Step time over dense on a CPU, where 2:4 can only cost")
    times.set_yticklabels([labels[row["model"]] for row in rows if row["method"] == name])
    times.grid(axis="y", visible=False)


def _shade_dense(axis: Axes, variant: str, label: str = "dense") -> None:
    """Grey where the schedule of the run's config is dense."""
    for run in list(best(variant).values())[:1]:
        total, config = run["arguments"]["max_steps"], run["sparse24"]
        start, tail = config.get("dense_start") or 0, config.get("dense_tail") or 0
        for left, right in [(0, start * total), (total - tail * total, total)]:
            if right > left:
                axis.axvspan(left, right, color=MUTED, alpha=0.15, linewidth=0)
                height = 0.04 if left == 0 else 0.5  # where no curve is
                place = {"transform": axis.get_xaxis_transform(), "ha": "center", "color": MUTED}
                axis.text((left + right) / 2, height, label, **place)


for _name in METHODS:
    picture(
        f"method-{_name}",
        f"{_name} beside dense training of a small Llama: training loss, validation loss by learning rate, flip rate, "
        "and step time over dense on a CPU",
        600,
        620,
    )(partial(method, _name))
