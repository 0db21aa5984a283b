"""The page and the picture of `methods.py`, from its runs: `results/methods.md`.

Every variant is shown at its best learning rate, the one with the lowest validation loss of seed 0. Two variants are
compared seed by seed, because one seed gives both the same initial weights and the same batches. The page is made of
the runs that there are: a variant may lack seeds or be missing, and a search may have tried any rates, so each row says
how many seeds it rests on, and what a table shows is said in words only where it follows from the numbers.
"""

import math
import statistics
from functools import reduce
from operator import getitem
from pathlib import Path

import matplotlib
from methods_runs import EMBEDDING_RATE, RATE_OF, Run, best_rate, best_runs, curve, gaps, mean, search, training_gaps

# Each variant of `methods.VARIANTS`, in the order of the tables, and what they say of it.
WHAT = {
    "dense": "the control",
    "fixed-mask": "one mask of the initial weights, kept",
    "s-ste": "soft threshold, MVUE",
    "sr-ste": "magnitude masks, decay 2e-4 on the gradient",
    "t-sr-ste": "transposable masks, MVUE, decay 6e-5, dense tail of a sixth",
    "step": "dense, then frozen variance and masks",
    "ste": "magnitude masks, straight-through, at `sr-ste`'s learning rate",
    "fixed-mask-late": "dense for the first half, then one mask, at dense's learning rate",
    "t-sr-ste-no-tail": "`t-sr-ste` without the tail, at its learning rate",
    "s-ste-no-mvue": "`s-ste` with the whole gradient, at its learning rate",
    "step-paper": "`step` with the paper's unclipped steps, at its learning rate",
}
# What the papers found: (better, worse, source).
CLAIMS = [
    ("dense", "fixed-mask", "a fixed random mask costs capacity; where it does not, this says nothing about masks"),
    ("dense", "s-ste", "every paper: 2:4 costs something"),
    ("sr-ste", "ste", "SR-STE, section 3"),
    ("t-sr-ste", "t-sr-ste-no-tail", "Hu et al. 2024 (ICML), dense fine-tuning"),
    ("s-ste", "sr-ste", "S-STE, Table 6"),
    ("s-ste-no-mvue", "s-ste", "S-STE, Table 3: MVUE on dZ costs little"),
    ("step", "sr-ste", "STEP, with Adam"),
    ("s-ste", "fixed-mask", "all: dynamic masks beat a fixed one at equal budget"),
    ("s-ste", "fixed-mask-late", "the same, of a mask chosen from trained weights"),
]


def page(runs: list[Run], picture: Path) -> str:
    """The page as Markdown; its picture is drawn into the file `picture`, which lies beside it."""
    best = {variant: found for variant in WHAT if (found := best_runs(runs, variant))}
    _draw(runs, best, picture)
    sections = [
        "# Methods side by side",
        _set_up(runs),
        f"![Validation loss by learning rate, training loss over dense and flip rate by step]({picture.name})",
        "## Best with best",
        _best(best),
        "## The search",
        _search(runs, best),
        "## Orderings of the papers",
        _claims(best),
    ]
    return "\n\n".join(sections) + "\n"


def _set_up(runs: list[Run]) -> str:
    first, versions = runs[0], [f"{name} {_stated(runs, 'versions', name)}" for name in runs[0]["versions"]]
    return (
        f"Made by `make methods` from {len(runs)} runs in `methods/`: a {first['model']} of {first['parameters']:,} "
        f"parameters on {first['tokens']:,} tokens of Python's standard library in {first['arguments']['max_steps']:,} "
        f"steps, {first['tokens'] / first['parameters']:.1f} tokens per parameter ({_stated(runs, 'device')}; "
        f"{', '.join(versions)}). The learning rate is that of the hidden layers; the embeddings and the head have "
        f"{EMBEDDING_RATE:g} everywhere. Each variant has the rate with the lowest validation loss of seed 0, which is "
        "then compared too, so the figures are slightly too good, for every method alike; only the ablations take "
        "another's rate. Masked decays and other settings are the methods' defaults, unless the variant says "
        "otherwise. Losses are in nats per token. A seed gives every variant the same initial weights and the same "
        "data in the same order, and differences are taken seed by seed. The model is small and the runs are short: "
        "they do not show what a method costs a model of useful size."
    )


def _stated(runs: list[Run], *keys: str) -> str:
    """What the runs say under the keys, each value once."""
    return " and ".join(sorted({str(reduce(getitem, keys, run)) for run in runs}))


def _best(best: dict[str, dict[int, Run]]) -> str:
    lines = [
        "| variant | what it is | best learning rate | validation loss: mean [lowest, highest] | seeds | over dense "
        "(pairs of seeds) | final flip rate |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant, found in best.items():
        losses = [run["eval_loss"] for run in found.values()]
        over = gaps(best.get("dense", {}), found)
        flips = [run["flip_rate"][-1] for run in found.values() if run["flip_rate"][-1] is not None]
        cells = [
            f"`{variant}`",
            WHAT[variant],
            f"{next(iter(found.values()))['learning_rate']:g}",
            f"{statistics.mean(losses):.3f} [{min(losses):.3f}, {max(losses):.3f}]",
            str(len(losses)),
            f"{statistics.mean(over):+.3f} ({len(over)})" if over else "",
            f"{statistics.mean(flips):.1e}" if flips else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    notes = (
        "Over dense is the mean difference to dense at dense's own best rate, on the seeds that both have. Flip rates "
        "are per step; those of `t-sr-ste` per mask refresh, every 40 steps. No step times: these runs were made "
        "beside other work. `recipes/benchmark_cpu.py` measures them: `recipes/results/cpu_step_time.json`."
    )
    return "\n".join([*lines, "", notes])


def _search(runs: list[Run], best: dict[str, dict[int, Run]]) -> str:
    tried = {variant: search(runs, variant) for variant in best}
    rates = sorted({rate for losses in tried.values() for rate in losses})
    lines = [
        "Validation loss of seed 0 by learning rate, the best in bold; an empty cell was not tried.\n",
        f"| variant | {' | '.join(f'{rate:g}' for rate in rates)} |",
        f"|---|{'---|' * len(rates)}",
    ]
    places: dict[str, list[str]] = {
        "between two that are worse": [],
        "the lowest tried, so that a lower one may be better still": [],
        "the highest tried, so that a higher one may be better still": [],
        "taken from another variant": [],
    }
    inside, lowest, highest, taken = places
    for variant, losses in tried.items():
        chosen = best_rate(losses)
        cells = {rate: f"**{loss:.3f}**" if rate == chosen else f"{loss:.3f}" for rate, loss in losses.items()}
        lines.append(f"| `{variant}` | {' | '.join(cells.get(rate, '') for rate in rates)} |")
        at_edge = lowest if chosen == min(losses) else highest if chosen == max(losses) else inside
        places[taken if variant in RATE_OF else at_edge].append(f"`{variant}`")
    said = [f"- {place}: {', '.join(variants)}" for place, variants in places.items() if variants]
    return "\n".join([*lines, "", "The rate in bold is\n", *said])


def _claims(best: dict[str, dict[int, Run]]) -> str:
    """Which orderings of the papers appear here, judged seed by seed; and whether masks can be compared at all."""
    lines = ["What the papers report, and what is seen here, each variant at its best rate:\n"]
    for better, worse, source in CLAIMS:
        found = gaps(best.get(better, {}), best.get(worse, {}))
        if found:
            seen = "seen" if all(gap > 0 for gap in found) else "**not seen**: seeds differ"
            seen = "**not seen**: the reverse" if all(gap < 0 for gap in found) else seen
            seen = "a run diverged" if any(math.isnan(gap) for gap in found) else seen
            seeds = f"{len(found)} seed{'s' * (len(found) > 1)}"
            shown = ", ".join(f"{gap:+.3f}" for gap in found)
            lines.append(f"- `{better}` below `{worse}` ({source}): {seen} ({seeds}, by {shown})")
    cost = gaps(best.get("dense", {}), best.get("fixed-mask", {}))
    if not all(gap > 0 for gap in cost):
        lines.append(
            "\n**At this size the comparison cannot rank masks.** `fixed-mask` is not behind dense on every seed. Its "
            "mask is that of random weights and knows nothing of the task; where even that one does not reliably cost "
            "anything, no figure here shows what a better mask is worth."
        )
    return "\n".join(lines)


def _draw(runs: list[Run], best: dict[str, dict[int, Run]], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (rates, losses, flips) = plt.subplots(1, 3, figsize=(16, 4.8), layout="constrained")
    for colour, variant in zip(plt.get_cmap("tab20").colors, WHAT):
        for axis, points in [
            (rates, list(search(runs, variant).items())),
            (losses, mean(training_gaps(best.get(variant, {}), best.get("dense", {})))),
            (flips, mean(curve(best.get(variant, {}), "flip_rate"))),
        ]:
            if points:
                axis.plot(*zip(*points), marker="o" if axis is rates else None, label=variant, color=colour)
    rates.set(xscale="log", xlabel="learning rate", ylabel="validation loss, seed 0")
    losses.set(xlabel="step", ylabel="training loss over dense, best with best, mean over seeds")
    flips.set(xlabel="step", ylabel="flip rate (t-sr-ste: per mask refresh)")
    flips.set_yscale("symlog", linthresh=1e-4)
    ticks = sorted({run["learning_rate"] for run in runs})
    rates.set_xticks(ticks, [f"{rate:g}" for rate in ticks], fontsize="small")
    rates.minorticks_off()
    figure.legend(*rates.get_legend_handles_labels(), loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)
