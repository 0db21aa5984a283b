"""Figures of committed results: recipes/results.

Of `recipes/compare_methods.py` any runs may be there; what has none is left out.
"""

import json
import statistics
from functools import cache, partial
from pathlib import Path

import methods_page
import methods_runs
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from style import BLUE, GREEN, GREY, GRID, INK, MUTED, ORANGE, PURPLE, picture

RESULTS = Path(__file__).resolve().parents[2] / "recipes" / "results"
METHODS = ("s-ste", "t-sr-ste", "sr-ste", "step", "fixed-mask", "slope", "ste")
COLOURS = dict(zip(METHODS, (BLUE, ORANGE, GREEN, PURPLE, MUTED, INK, GREY)))
VARIANTS = [variant for variant in methods_page.WHAT if variant not in ("dense", *METHODS)]
"""What `recipes/compare_methods.py` runs or ran besides the methods, each called like its method with a suffix."""


def variants_of(method: str) -> list[str]:
    return [variant for variant in VARIANTS if methods_page.method_of(variant) == method]


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
    "methods",
    "Validation loss over the dense control, each at its best learning rate, the methods above and their variants "
    "below: a ring for seed 0, which all have, and a dot for the mean where there are several seeds, with their range",
    height=420,
)
def methods(figure: Figure) -> None:
    axis = figure.subplots()
    groups = [[variant for variant in names if over_dense(variant)] for names in (METHODS, VARIANTS)]
    rows = [*groups[0], None, *groups[1]] if all(groups) else [*groups[0], *groups[1]]
    for row, variant in enumerate(rows):
        if variant is None:
            axis.axhline(row, color=GRID, linewidth=1.2)
            continue
        values, colour = over_dense(variant), BLUE if variant in METHODS else ORANGE
        axis.plot([min(values), max(values)], [row, row], color=colour, linewidth=1.8)
        axis.plot(values[0], row, "o", color=colour, markersize=9, markerfacecolor="none", markeredgewidth=1.6)
        if len(values) > 1:
            axis.plot(statistics.mean(values), row, "o", color=colour, markersize=8)
    axis.axvline(0, color=MUTED, linestyle="--", linewidth=1.4)
    axis.set(
        ylim=(max(len(rows), 1) - 0.5, -0.5), xlabel="validation loss over dense, nats per token", title=the_model()
    )
    labels = [(row, variant) for row, variant in enumerate(rows) if variant]
    axis.set_yticks([row for row, _ in labels], [variant for _, variant in labels])
    for tick, (_, variant) in zip(axis.get_yticklabels(), labels):
        tick.set_color(BLUE if variant in METHODS else ORANGE)
    axis.grid(axis="y", visible=False)
    shown = [("methods", BLUE, "s"), ("variants", ORANGE, "s"), ("seed 0", INK, "o"), ("mean of seeds", INK, "o")]
    handles = [
        Line2D([], [], color=colour, marker=mark, linestyle="", markerfacecolor="none" if label == "seed 0" else colour)
        for label, colour, mark in shown
    ]
    figure.legend(handles, [label for label, *_ in shown], loc="outside lower left", ncols=4, columnspacing=0.9)


@picture(
    "rates",
    "Validation loss of seed 0 against the learning rate, for dense training, emphasised, and the methods whose rate "
    "was searched for",
    height=380,
)
def rates(figure: Figure) -> None:
    axis = figure.subplots()
    _draw_search(axis, "dense", INK, "dense", "o--", linewidth=3, markersize=8)
    for name, line in zip(METHODS, ("o-", "s-", "^-", "v-", "D-", "P-", "X-")):
        if name not in methods_runs.RATE_OF:
            _draw_search(axis, name, COLOURS[name], name, line, linewidth=1.8)
    _rate_axis(axis)
    axis.set(ylabel="validation loss, seed 0", title=the_model())
    if handles := axis.get_legend_handles_labels()[0]:
        figure.legend(handles=handles, loc="outside lower center", ncols=3)


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
    "Training loss over the dense control, step by step, after the first quarter of the run: each method in blue, and "
    "in its panel its variants, dashed; each at its best learning rate",
    height=620,
)
def curves(figure: Figure) -> None:
    shown = [name for name in METHODS if best(name)]
    axes = figure.subplots(max(-(-len(shown) // 2), 1), 2, sharex=True, sharey=True, squeeze=False)
    for axis in axes.flat[len(shown) :]:
        axis.set_axis_off()
    for axis, name in zip(axes.flat, shown):
        # Two variants at most: more lines could not be told apart.
        for variant, colour, line in zip([name, *variants_of(name)[:2]], (BLUE, ORANGE, PURPLE), ("-", "--", ":")):
            _draw_band(axis, _training_gaps(variant)[::2], colour, variant, line, "default")  # the file stays small
        axis.axhline(0, color=MUTED, linestyle="--", linewidth=1.2)
        _shade_dense(axis, name, "")
        axis.set_title(name)
        if any(map(_training_gaps, variants_of(name))):
            axis.legend(*_entries(axis, 1), loc="upper left", fontsize=11.5)
    axes[0, 0].locator_params(nbins=4)
    for axis in axes[-1]:
        axis.set(xlabel="step")
    axes[len(axes) // 2, 0].set(ylabel="training loss over dense, nats per token")


def _training_gaps(variant: str) -> list[tuple[int, tuple[float, ...]]]:
    return methods_runs.training_gaps(best(variant), best("dense"))


def _entries(axis: Axes, first: int) -> tuple[list, list]:
    """Entries of a legend, from the `first` on."""
    handles, labels = axis.get_legend_handles_labels()
    return handles[first:], labels[first:]


def method(name: str, figure: Figure) -> None:
    """Loss, search of the learning rate, flip rate and step time of one method and the dense control."""
    loss, search, flips, times = figure.subplots(4, 1, height_ratios=[1, 0.9, 0.8, 0.6])
    for variant, colour, line in [("dense", MUTED, "--"), (name, BLUE, "-")]:
        draw_curve(loss, best(variant), "loss", colour, _with_loss(variant), line)
        _draw_search(search, variant, colour, variant, f"o{line}")
    loss.set(title="Training loss", xlabel="step", ylim=(None, 8))
    _shade_dense(loss, name)
    _legend(loss, loc="upper right", title="validation loss", title_fontsize=12.5, alignment="left")
    search.set(title="Validation loss by learning rate")
    _rate_axis(search)
    _legend(search)

    draw_curve(flips, best(name), "flip_rate", BLUE, name, steps_of="steps-post" if name == "t-sr-ste" else "default")
    flips.set(title=f"Flip rate, per {'refresh' if name == 't-sr-ste' else 'step'}", xlabel="step")
    _shade_dense(flips, name)
    keeps_mask = name in ("fixed-mask", "slope")
    flips.set_ylim(0, 0.01 if keeps_mask else None)
    if keeps_mask:
        flips.text(0.5, 0.5, "zero: the mask is kept", ha="center", va="center", transform=flips.transAxes)

    found = json.loads((RESULTS / "cpu_step_time.json").read_text())["sections"]["pruning"]["rows"]
    labels = {"gpt2-124m": "GPT-2 124M", "llama-quickstart": "small Llama"}
    fact = f"{name} over dense"
    rows = {case.split(", ")[0]: row["facts"][fact] for case, row in found.items() if fact in row["facts"]}
    for y, speedups in enumerate(rows.values()):
        most, ratio, least = (1 / x for x in speedups)
        times.plot([least, most], [y, y], color=(GREEN, PURPLE)[y], linewidth=2)
        times.plot(ratio, y, "o", color=(GREEN, PURPLE)[y], markersize=8)
        times.text(most + 0.02, y, f"{ratio:.2f}", va="center", color=(GREEN, PURPLE)[y])
    if not rows:
        times.text(0.5, 0.5, "not measured", ha="center", va="center", transform=times.transAxes)
    times.axvline(1, color=MUTED, linestyle="--", linewidth=1.4)
    times.set(yticks=range(len(rows)), ylim=(1.5, -0.6), xlim=(0.6, 1.7))
    times.set(title="Step time over dense, on a CPU")
    times.set_yticklabels([labels[model] for model in rows])
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
        f"{_name} next to dense training of a small Llama: training loss, validation loss by learning rate, flip rate, "
        "and step time over dense on a CPU",
        height=800,
    )(partial(method, _name))
