"""Figures of committed results: recipes/results."""

import json
import statistics
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sparse24_kernels import nm_prune
from style import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, arrow, cells, matrix, picture

RESULTS = Path(__file__).resolve().parents[2] / "recipes" / "results"
METHODS = ("s-ste", "t-sr-ste", "sr-ste", "step", "fixed-mask", "ste")
# Model, its name in figures, its colour.
MODELS = {"llama": ("Llama, 1.2M", BLUE), "gpt2": ("GPT-2, 0.9M", ORANGE)}
SEEDS = (0, 1, 2)


@cache
def runs(model: str, variant: str) -> list[dict[str, Any]]:
    """The runs of all seeds."""
    files = [RESULTS / "methods" / f"{model}-{variant}-seed{seed}.json" for seed in SEEDS]
    return [json.loads(file.read_text()) for file in files]


def over_dense(model: str, variant: str) -> list[float]:
    """Validation loss over that of the dense run, seed by seed."""
    return [run["eval_loss"] - dense["eval_loss"] for run, dense in zip(runs(model, variant), runs(model, "dense"))]


def draw_curve(
    axis: Axes, model: str, variant: str, key: str, colour: str, label: str, line: str = "-", steps_of: str = "default"
) -> None:
    """Mean over seeds of what was logged, and the range; steps without a value left out."""
    found = runs(model, variant)
    points = [
        (step, values)
        for step, values in zip(found[0]["steps"], zip(*(run[key] for run in found)))
        if None not in values
    ]
    if not points:
        return
    steps = [step for step, _ in points]
    axis.plot(
        steps, [statistics.mean(values) for _, values in points], line, color=colour, label=label, drawstyle=steps_of
    )
    lowest, highest = [min(values) for _, values in points], [max(values) for _, values in points]
    step = None if steps_of == "default" else steps_of.removeprefix("steps-")
    axis.fill_between(steps, lowest, highest, color=colour, alpha=0.2, linewidth=0, step=step)


@picture(
    "hero",
    "Left: an 8 x 8 weight matrix, dense and 2:4, where two of every four values in a row are blank. Right: training "
    "loss of a Llama of 1.2M parameters over 200 steps, dense and s-ste: the curves lie on each other",
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
    draw_curve(right, "llama", "dense", "loss", MUTED, _with_loss("dense"), "--")
    draw_curve(right, "llama", "s-ste", "loss", BLUE, _with_loss("s-ste"))
    right.set(xlabel="step", ylabel="training loss", title="Llama, 1.2M parameters, on a CPU", ylim=(4.6, 8.6))
    right.legend(title="validation loss, 3 seeds", title_fontsize=12.5, alignment="left")


def _with_loss(variant: str) -> str:
    losses = [run["eval_loss"] for run in runs("llama", variant)]
    return f"{variant}: {statistics.mean(losses):.2f} [{min(losses):.2f}, {max(losses):.2f}]"


VARIANTS = {
    "s-ste": "s-ste",
    "s-ste-no-mvue": "s-ste without MVUE",
    "s-ste-fp8": "s-ste, FP8 simulated",
    "t-sr-ste": "t-sr-ste",
    "t-sr-ste-no-tail": "t-sr-ste without tail",
    "sr-ste": "sr-ste",
    "step": "step",
    "fixed-mask": "fixed-mask",
    "ste": "ste",
}
"""What `recipes/methods.py` calls them, and what figures do."""


@picture(
    "methods",
    "Validation loss over the dense control for every method and variant on two tiny models, three seeds each: most "
    "lie within 0.05 nats of dense, t-sr-ste about 0.08 above",
    600,
    470,
)
def methods(figure: Figure) -> None:
    axis = figure.subplots()
    for row, variant in enumerate(VARIANTS):
        for shift, (model, (label, colour)) in zip((-0.16, 0.16), MODELS.items()):
            _dots(axis, over_dense(model, variant), row + shift, colour, None if row else label)
    axis.axvline(0, color=MUTED, linestyle="--", linewidth=1.4)
    axis.set(
        yticks=range(len(VARIANTS)),
        ylim=(len(VARIANTS) - 0.5, -0.5),
        xlabel="validation loss over dense, nats per token",
        title="Tiny models, 200 steps on a CPU, 3 seeds: mean and range",
    )
    axis.set_yticklabels(VARIANTS.values())
    for tick, variant in zip(axis.get_yticklabels(), VARIANTS):
        tick.set_color(INK if variant in METHODS else MUTED)
    axis.grid(axis="y", visible=False)
    axis.legend(loc="lower right")


@picture(
    "curves",
    "Training loss over the dense control, step by step, for nine methods and variants on two tiny models. It is "
    "highest around step 60, up to 0.08 for s-ste and 0.13 for t-sr-ste; step and fixed-mask stay within 0.02",
    600,
    560,
)
def curves(figure: Figure) -> None:
    axes = figure.subplots(3, 3, sharex=True, sharey=True)
    for place, (axis, (variant, title)) in enumerate(zip(axes.flat, VARIANTS.items())):
        for model, (label, colour) in MODELS.items():
            steps = runs(model, variant)[0]["steps"]
            pairs = zip(runs(model, variant), runs(model, "dense"))
            gaps = list(zip(*([a - b for a, b in zip(run["loss"], dense["loss"])] for run, dense in pairs)))
            axis.plot(steps, [statistics.mean(gap) for gap in gaps], color=colour, label=label)
            lowest, highest = [min(gap) for gap in gaps], [max(gap) for gap in gaps]
            axis.fill_between(steps, lowest, highest, color=colour, alpha=0.2, linewidth=0)
        axis.axhline(0, color=MUTED, linestyle="--", linewidth=1.2)
        _shade_dense(axis, variant, "")
        axis.set_title(title, fontsize=12.5)
        axis.set(xlabel="step" if place > 5 else None, xlim=(0, 205), xticks=[0, 100, 200])
    axes[1, 0].set(ylabel="training loss over dense, nats per token")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)


def _dots(axis: Axes, values: list[float], y: float, colour: str, label: str | None) -> None:
    """The range of seeds as a line, each seed as a small dot, the mean as a large one."""
    axis.plot([min(values), max(values)], [y, y], color=colour, linewidth=1.8)
    axis.plot(values, [y] * len(values), "|", color=colour, markersize=9, markeredgewidth=1.6)
    axis.plot(statistics.mean(values), y, "o", color=colour, markersize=8, label=label)


def method(name: str, figure: Figure) -> None:
    """Loss, flip rate and step time of one method beside the dense control."""
    top, middle, bottom = figure.subfigures(3, 1, height_ratios=[1, 0.95, 0.62])
    axes = top.subplots(1, 2, sharey=True)
    for axis, (model, (label, colour)) in zip(axes, MODELS.items()):
        draw_curve(axis, model, "dense", "loss", MUTED, "dense", "--")
        draw_curve(axis, model, name, "loss", colour, name)
        axis.set(title=label, xlabel="step", xlim=(0, 205))
        _shade_dense(axis, name)
        axis.legend(loc="upper right")
    axes[0].set(ylabel="training loss")

    loss, flips = middle.subplots(1, 2)
    for y, (model, (label, colour)) in enumerate(MODELS.items()):
        values = over_dense(model, name)
        _dots(loss, values, y, colour, None)
        loss.text(max(values) + 0.006, y, f"{statistics.mean(values):+.3f}", va="center", color=colour)
        line = "steps-post" if name == "t-sr-ste" else "default"
        draw_curve(flips, model, name, "flip_rate", colour, label, steps_of=line)
    loss.axvline(0, color=MUTED, linestyle="--", linewidth=1.4)
    loss.set(yticks=[0, 1], ylim=(1.5, -0.6), title="Validation loss over dense", xlim=(-0.06, 0.14))
    loss.set_yticklabels(["Llama", "GPT-2"])
    loss.grid(axis="y", visible=False)
    refreshes = ", per refresh" if name == "t-sr-ste" else ", per step"
    flips.set(title=f"Flip rate{refreshes}", xlabel="step", xlim=(0, 205))
    _shade_dense(flips, name)
    flips.set_ylim(0, None if name != "fixed-mask" else 0.01)
    if name == "fixed-mask":
        flips.text(150, 0.005, "zero: the\nmask is kept", ha="center", va="center")

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
    run = runs("llama", variant)[0]
    total, config = run["arguments"]["max_steps"], run["sparse24"]
    start, tail = config.get("dense_start") or 0, config.get("dense_tail") or 0
    for left, right in [(0, start * total), (total - tail * total, total)]:
        if right > left:
            axis.axvspan(left, right, color=MUTED, alpha=0.15, linewidth=0)
            height = 0.04 if left == 0 else 0.5  # where no curve is
            axis.text((left + right) / 2, height, label, transform=axis.get_xaxis_transform(), ha="center", color=MUTED)


for _name in METHODS:
    picture(
        f"method-{_name}",
        f"{_name} beside dense training on two tiny models: training loss, validation loss over dense, flip rate, and "
        "step time over dense on a CPU",
        600,
        620,
    )(partial(method, _name))
