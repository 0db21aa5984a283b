"""The page of `compare_methods.py`, from its runs: `results/methods.md`.

Every variant is shown at its best learning rate, the one with the lowest validation loss of seed 0. Two variants are
compared seed by seed, because one seed gives both the same initial weights and the same batches. Numbers of seed 0 and
means of several seeds stand in columns of their own: one seed may be far from the mean. The page is made of the runs
that there are: a variant may lack seeds or be missing, and a search may have tried any rates.
"""

import statistics
from functools import reduce
from operator import getitem

from methods_runs import EMBEDDING_RATE, RATE_OF, Run, best_rate, best_runs, gaps, search

# The variants of `compare_methods.VARIANTS` and those that it ran once, in the order of the tables, and what these say
# of each. A variant of a method has the method's name with a suffix.
WHAT = {
    "dense": "the control",
    "fixed-mask": "one mask of the initial weights, kept",
    "s-ste": "soft threshold, MVUE",
    "sr-ste": "magnitude masks, decay 2e-4 on the gradient",
    "t-sr-ste": "transposable masks, MVUE, decay 6e-5, dense tail of a sixth",
    "step": "dense, then frozen variance and masks",
    "ste": "magnitude masks, straight-through, at `sr-ste`'s learning rate",
    "ast": "masks by magnitude every 10 steps, AdamS with decay 1e-4, no teacher",
    "cast": "dense with AdamS, decay 4e-7, scales; pruned at the end; no teacher; code of 49d34cb",
    "slope": "one mask of the initial weights, kept; another one backward",
    "fixed-mask-late": "dense for the first half, then one mask, at dense's learning rate",
    "s-ste-greedy": "`s-ste` with the largest gradients in place of MVUE, at its learning rate",
    "s-ste-mvue-weight": "`s-ste` with MVUE on the weight of grad_input too, at its learning rate",
    "s-ste-scale-each-step": "`s-ste` with a scale that is computed in each step, at its learning rate",
    "s-ste-gamma-0.5": "`s-ste` with the threshold half-way to the third magnitude, at its learning rate",
    "ast-decay-6e-3": "`ast` with `sr-ste`'s searched decay, at its learning rate",
    "cast-decay-1e-3": "`cast` with more decay, at its learning rate; code of 49d34cb",
    "step-paper": "`step` with the paper's unclipped steps, at its learning rate",
}


def method_of(variant: str) -> str:
    """The method that it is a variant of; of a method itself, its own name."""
    return next((name for name in WHAT if variant.startswith(f"{name}-")), variant)


def page(runs: list[Run]) -> str:
    """The page as Markdown, without pictures: those of the committed runs are on the site."""
    best = {variant: found for variant in WHAT if (found := best_runs(runs, variant))}
    sections = [
        "# Methods side by side",
        _result(best),
        "## Methods",
        _methods(best),
        *(["## Variants", variants] if (variants := _variants(best)) else []),
        "## The search",
        _search(runs, best),
        "## How it was made",
        _set_up(runs),
    ]
    return "\n\n".join(sections) + "\n"


def _result(best: dict[str, dict[int, Run]]) -> str:
    """What the methods cost, in a paragraph."""
    control = best.get("dense", {})
    over = {name: gaps(control, found) for name, found in best.items() if name == method_of(name) != "dense"}
    repeated = {name: values for name, values in over.items() if len(values) > 1}
    if not repeated:
        return "No method has been run with two seeds that dense training has, too: the tables show seed 0."
    means = {name: statistics.mean(values) for name, values in repeated.items()}
    lowest, highest = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    varies = max(max(values) - min(values) for values in repeated.values())
    dense = [run["eval_loss"] for run in control.values()]
    once = [f"`{name}`" for name, values in over.items() if len(values) == 1]
    single = f"; with one seed alone: {', '.join(once)}" if once else ""
    return (
        f"**A small Llama trained dense ends at a validation loss of {statistics.mean(dense):.3f} nats per token. "
        f"Trained 2:4 it ends between {means[lowest]:+.3f} (`{lowest}`) and {means[highest]:+.3f} (`{highest}`) over "
        f"that**, in the mean of two seeds or more{single}. From seed to "
        f"seed the distance of one method to dense differs by up to {varies:.3f}: smaller differences between two "
        "methods mean nothing. The model is small and the runs are short, so they show that every method trains, not "
        "what it costs a model of useful size."
    )


def _set_up(runs: list[Run]) -> str:
    first, versions = runs[0], [f"{name} {_stated(runs, 'versions', name)}" for name in runs[0]["versions"]]
    device = _stated(runs, "device").replace("1 thread(s)", "1 thread")
    return (
        f"Made by `make methods` from {len(runs)} runs in `methods/`: a {first['model']} of {first['parameters']:,} "
        f"parameters on {first['tokens']:,} tokens of Python's standard library in {first['arguments']['max_steps']:,} "
        f"steps, {first['tokens'] / first['parameters']:.1f} tokens per parameter ({device}; "
        f"{', '.join(versions)}). The learning rate is that of the hidden layers; the embeddings and the head have "
        f"{EMBEDDING_RATE:g} everywhere. Seed 0 decides the learning rate of each variant and is also part of the "
        "comparison, so all losses are slightly low. Masked decays and other settings are the methods' defaults, "
        "unless the variant says otherwise. A seed gives every variant the same initial weights and the same data in "
        "the same order, and differences are taken seed by seed. Other work ran at the same time, so their "
        "times say nothing: `recipes/benchmarks/cpu.py pruning` measures step times "
        "(`recipes/results/cpu_step_time.json`)."
    )


def _stated(runs: list[Run], *keys: str) -> str:
    """What the runs say under the keys, each value once."""
    return " and ".join(sorted({str(reduce(getitem, keys, run)) for run in runs}))


def _methods(best: dict[str, dict[int, Run]]) -> str:
    lines = [
        "| method | seed 0: loss | seed 0: over dense | mean over dense [lowest, highest] | seeds | learning rate "
        "| final flip rate | what it is |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in filter(best.__contains__, WHAT):
        if name == method_of(name):
            control = {} if name == "dense" else best.get("dense", {})
            flips = [run["flip_rate"][-1] for run in best[name].values() if run["flip_rate"][-1] is not None]
            flip_rate = f"{statistics.mean(flips):.2g}" if flips else ""
            lines.append(_row(name, best[name], control, flip_rate))
    notes = (
        "Compare seed 0 with seed 0 and means with means: a method with one seed has no mean yet. Over dense is the "
        "loss minus that of dense training with the same seed, at dense's own best rate; seeds counts those that both "
        "have. Flip rates are per step; those of `t-sr-ste` per mask refresh, every 40 steps, of `ast` "
        "and `cast` every 10."
    )
    return "\n".join([*lines, "", notes])


def _variants(best: dict[str, dict[int, Run]]) -> str:
    lines = [
        "| variant | seed 0: loss | seed 0: over its method | mean over its method [lowest, highest] | seeds "
        "| learning rate | what it is |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in filter(best.__contains__, WHAT):
        if name != method_of(name):
            lines.append(_row(name, best[name], best.get(method_of(name), {})))
    notes = "A variant is a method, the first part of its name, with other settings. Below zero it ends better."
    return "\n".join([*lines, "", notes]) if len(lines) > 2 else ""


def _row(name: str, found: dict[int, Run], control: dict[int, Run], *more: str) -> str:
    first = found[0]
    cells = [f"`{name}`", f"{first['eval_loss']:.3f}", *_over(control, found), f"{first['learning_rate']:g}", *more]
    return f"| {' | '.join([*cells, WHAT[name]])} |"


def _over(control: dict[int, Run], found: dict[int, Run]) -> list[str]:
    """Cells: the difference of seed 0, the mean and the range of several seeds, and how many seeds both have."""
    values = gaps(control, found)
    if not values:
        return ["", "", str(len(found))]
    repeated = f"{statistics.mean(values):+.3f} [{min(values):+.3f}, {max(values):+.3f}]" if len(values) > 1 else ""
    return [f"{values[0]:+.3f}", repeated, str(len(values))]


def _search(runs: list[Run], best: dict[str, dict[int, Run]]) -> str:
    tried = {variant: search(runs, variant) for variant in best}
    rates = sorted({rate for losses in tried.values() for rate in losses})
    lines = [
        "Validation loss of seed 0 by learning rate, the best in bold; an empty cell was not tried.\n",
        f"| variant | {' | '.join(f'{rate:g}' for rate in rates)} |",
        f"|---|{'---|' * len(rates)}",
    ]
    places: dict[str, list[str]] = {
        "The best rate has a worse one on either side": [],
        "The best rate is the lowest tried; a lower one may be better still": [],
        "The best rate is the highest tried; a higher one may be better still": [],
        "The rate is that of another variant, without a search": [],
    }
    inside, lowest, highest, taken = places
    for variant, losses in tried.items():
        chosen = best_rate(losses)
        cells = {rate: f"**{loss:.3f}**" if rate == chosen else f"{loss:.3f}" for rate, loss in losses.items()}
        lines.append(f"| `{variant}` | {' | '.join(cells.get(rate, '') for rate in rates)} |")
        at_edge = lowest if chosen == min(losses) else highest if chosen == max(losses) else inside
        places[taken if variant in RATE_OF else at_edge].append(f"`{variant}`")
    said = [f"- {place}: {', '.join(variants)}" for place, variants in places.items() if variants]
    return "\n".join([*lines, "", *said])
