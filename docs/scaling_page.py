"""The page of the gap to dense training by size, from the committed runs, so that it cannot drift."""

import json
import math
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from hf_sparse24.tables import markdown_table

Run = dict[str, Any]

INTRO = """# Does the gap close with size?

Llamas trained from scratch, dense and sparse, on the same tokens: about nine a parameter.

```bash
python recipes/scaling/scaling.py
```

- The gap is the validation loss over the dense model's of the same seed and dtype, in nats a token.
- MLPs are sparse. Text: 200 MB of Python sources; validation is four packages that training does not see.
- `dense half` is dense, with MLPs of half the width: as many weights there as the sparse models have that are not zero.
- `t-sr-ste` ends in its dense tail, as published: its loss is that of dense weights, the others' of sparse ones.
- Each method has its learning rate from [Methods side by side](methods.md), times 64 / width.
- A range in brackets is over the seeds: up to three. A cell without one is one seed."""

HALF = "dense half"

PUBLISHED = """## Published gaps

S-STE (arXiv 2409.09099, Table 6) and T-SR-STE (2404.01847) report GPT-2 of 124M to 774M parameters. We could not
check the numbers of those tables against the papers' text, so none is drawn here."""


def read(folder: Path) -> list[Run]:
    """The runs, the smallest model first."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*-seed*.json"))]
    return sorted(runs, key=lambda run: (run["parameters"], run["variant"], run["factor"], run["seed"]))


def losses(runs: list[Run], size: str, variant: str, factor: float = 1) -> dict[tuple[int, str], float]:
    """Validation loss by seed and dtype."""
    cell = (size, variant, factor)
    cells = [run for run in runs if (run["size"], run["variant"], run["factor"]) == cell]
    return {_pair(run): run["eval_loss"] for run in cells}


def _pair(run: Run) -> tuple[int, str]:
    return run["seed"], run["dtype"]


def sizes(runs: list[Run]) -> dict[str, int]:
    """Parameters of the sizes that have a dense run, the smallest first."""
    return {run["size"]: run["parameters"] for run in runs if (run["variant"], run["factor"]) == ("dense", 1)}


def variants(runs: list[Run]) -> list[str]:
    """Those next to dense, in the order of the recipe."""
    order = ["s-ste", "s-ste 16:32", "sr-ste", "t-sr-ste", HALF]
    return [name for name in order if any(run["variant"] == name for run in runs)]


def gaps(runs: list[Run], size: str, variant: str, control: str = "dense") -> list[float]:
    """Loss over the control's of the same seed and dtype, where there is one."""
    others = losses(runs, size, control)
    return [loss - others[pair] for pair, loss in losses(runs, size, variant).items() if pair in others]


def dense_equivalent(runs: list[Run], size: str, variant: str) -> float | None:
    """Parameters of a dense model with the same loss, over its own; None outside of the sizes measured.

    Between two sizes, the loss is taken as linear in the logarithm of the parameters.
    """
    loss = fmean(losses(runs, size, "dense").values()) + fmean(gaps(runs, size, variant))
    points = [(math.log(count), fmean(losses(runs, name, "dense").values())) for name, count in sizes(runs).items()]
    for (small, high), (large, low) in pairwise(points):
        if low <= loss <= high:
            return math.exp(small + (large - small) * (high - loss) / (high - low)) / sizes(runs)[size]
    return None


def page(folder: Path) -> str:
    """The page of the results in a folder."""
    runs = read(folder)
    names = variants(runs)
    picture = "The gap to dense training in nats and in percent, by the number of parameters, of each method"
    absolute, percent, equal, halves = [], [], [], []
    for size, count in sizes(runs).items():
        dense = losses(runs, size, "dense")
        tokens = next(run["tokens"] for run in runs if run["size"] == size)
        found = {name: gaps(runs, size, name) for name in names}
        mean = fmean(dense.values())
        label = f"{count / 1e6:.2g}M"
        absolute.append([label, f"{tokens / 1e6:.0f}M", ranged(list(dense.values())), *map(ranged, found.values())])
        percent.append([label, *(f"{100 * fmean(each) / mean:.1f}%" if each else "" for each in found.values())])
        ratios = [dense_equivalent(runs, size, name) if found[name] else None for name in names]
        equal.append([label, *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)])
        halves.append([label, *(ranged(gaps(runs, size, name, HALF)) for name in names if name != HALF)])
    parts = [
        INTRO,
        f"![{picture}](../images/scaling.svg)",
        markdown_table(["parameters", "tokens", "dense loss", *(f"{name}, nats" for name in names)], absolute),
        "In percent of the dense loss:",
        markdown_table(["parameters", *names], percent),
    ]
    if equal := [row for row in equal if any(row[1:])]:
        parts += [
            "How large is a dense model with the same loss? Its parameters over the sparse model's. Between two sizes, "
            "the loss is taken as linear in the logarithm of the parameters:",
            markdown_table(["parameters", *names], equal),
        ]
    if halves := [row for row in halves if any(row[1:])]:
        over = [f"{name}, nats" for name in names if name != HALF]
        parts += ["## At equal non-zeros", SMALLER, markdown_table(["parameters", *over], halves)]
    versions, device = runs[0]["versions"], runs[0]["device"]
    fp32 = [f"{run['size']} {run['variant']} seed {run['seed']}" for run in runs if run["dtype"] == "fp32"]
    exact = f"; in fp32: {', '.join(dict.fromkeys(fp32))}" if fp32 else ""
    made = f"torch {versions['torch']}, {device}; compiled, bf16 autocast{exact}."
    return "\n\n".join([*parts, READING, rates(runs), PUBLISHED, sources(folder), made]) + "\n"


SMALLER = f"""Loss over `{HALF}`, seed by seed: below zero where 2:4 is better than a smaller dense model. Pairs differ
by 0.02 nats or more, and the smaller model's learning rate was not searched: 2:4 is not clearly better."""

READING = """## What it allows to expect

Nothing about 1B parameters. In nats only the step to 3M, one seed, hints at a smaller gap. In the parameters of an
equally good dense model, which has fewer tokens too, the gap does not close. Cells of different seeds cannot be
compared: on equal seeds 16:32 has a smaller gap than 2:4. 16:32 and `sr-ste` at 3M, and runs of 5.5M parameters, have
not been made: the command above makes them."""


def ranged(values: list[float]) -> str:
    """Their mean, and the least and the greatest where there are several."""
    if not values:
        return ""
    mean = f"{fmean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} [{min(values):.3f}, {max(values):.3f}]"


def rates(runs: list[Run]) -> str:
    """What another learning rate than the rule's gives."""
    tried = [run for run in runs if run["factor"] != 1 and _pair(run) in losses(runs, run["size"], run["variant"])]
    text = "## The rule of the learning rate\n\n"
    if not tried:
        return text + "Not checked yet."
    changes = [run["eval_loss"] - losses(runs, run["size"], run["variant"])[_pair(run)] for run in tried]
    rows = [
        [run["size"], run["variant"], f"{run['learning_rate']:g}", f"{run['factor']:g}", f"{change:+.3f}"]
        for run, change in zip(tried, changes)
    ]
    text += "Loss at another learning rate, over that at the rule's, same seed. No lower rate was tried.\n\n"
    return text + markdown_table(["size", "variant", "learning rate", "times the rule's", "nats"], rows)


def sources(folder: Path) -> str:
    found = json.loads((folder / "sources.json").read_text())
    rows = [[facts["wheel"], facts["licence"], f"{facts['characters'] / 1e6:.1f}"] for facts in found.values()]
    return "## Text and licences\n\n" + markdown_table(["wheel", "licence", "million characters"], rows)
