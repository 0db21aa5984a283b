"""The page of what `recipes/analysis.py` measured, from its committed results: it cannot drift."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hf_sparse24.tables import markdown_table

Run = dict[str, Any]

INTRO = """# Does a step gain what was predicted?

Two papers explain with pictures why 2:4 training is hard.

- S-STE (arXiv 2409.09099, Figures 1 and 2): with a hard threshold the loss jumps where weights flip. So the gain of a
  step cannot be predicted, and a step that descends with the old mask may ascend with the new one.
- T-SR-STE (2404.01847): masks flip where two of them are nearly as good, and masked decay calms them.

`recipes/analysis.py` makes the same pictures of the small Llama of [methods side by side](methods.md). It defines each
number itself, because we know the papers' definitions from captions alone.

{steps} steps of 1,024 tokens, every {every}th measured; hidden layers at one learning rate of {learning_rate:g} for
all, no MVUE, no dense tail; seeds {seeds}. A cell is the mean over seeds, with each seed in brackets."""

READING = """With a hard threshold no measured step ascends, and flips carry a part of the descent, more of it as
steps get shorter. Our reading: a weight enters the mask because the straight-through gradient made it grow, so its
jump mostly goes the way of the descent. Thousands of small jumps are one small change of the weights that the GEMMs
see, and by that change every step is predicted as well as in dense training. Where a mask is held for {refresh}
steps, refreshes raise the loss, as the papers say. The soft threshold has no jumps, and its measured steps gain no
more. The papers' models are larger and trained longer with shorter steps; this says nothing about them."""


def page(path: Path) -> str:
    """The page of a file of results."""
    result = json.loads(path.read_text())
    runs: list[Run] = result["runs"]
    seeds = ", ".join(str(seed) for seed in sorted({run["seed"] for run in runs}))
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    parts = [INTRO.format(**result["settings"], seeds=seeds)]
    parts += ["## What the papers say, and what is seen", claims(runs), READING.format(**result["settings"])]
    for title, image, alt, text, variants, columns in SECTIONS:
        parts += [f"## {title}", f"![{alt}](../images/{image}.svg)", text.format(**result["settings"])]
        parts.append(table(runs, variants, columns))
    return "\n\n".join([*parts, f"Made on a CPU by one thread; {versions}."]) + "\n"


def error(run: Run, key: str) -> float:
    points = run["points"]
    off = [abs(a - b) for a, b in zip(points["actual"], points[key])]
    return sum(off) / sum(abs(a) for a in points["actual"])


def correlation(run: Run) -> float:
    return statistics.correlation(run["points"]["predicted"], run["points"]["actual"])


def gained(run: Run) -> float:
    return sum(run["points"]["actual"]) / sum(run["points"]["predicted"])


def ascents(run: Run) -> float:
    return share(value < 0 for value in run["points"]["actual"])


def wrong(run: Run) -> float:
    points = run["points"]
    return share(held > 0 > actual for held, actual in zip(points["held"], points["actual"]))


def by_flips(run: Run) -> float:
    points = run["points"]
    return sum(abs(a - h) for a, h in zip(points["actual"], points["held"])) / sum(map(abs, points["held"]))


def gain_of_flips(run: Run, last: float = 1.0) -> float:
    """Of the last part of a run's measured steps."""
    start = round(len(run["points"]["step"]) * (1 - last))
    actual, held = run["points"]["actual"][start:], run["points"]["held"][start:]
    return sum(a - h for a, h in zip(actual, held)) / sum(map(abs, held))


def share(values: Any) -> float:
    return statistics.mean(map(float, values))


def flip_rates(run: Run) -> list[float]:
    """Per refresh."""
    return [rate for _, rate in run["tiles"]["flip_rates"]]


def fades(rates: list[float]) -> bool:
    """Whether rates rise, and end below a quarter of their highest."""
    return rates.index(max(rates)) > 0 and rates[-1] < max(rates) / 4


Column = tuple[str, Callable[[Run], float], str]
ROWS = ("dense", "ste", "sr-ste", "s-ste")
TILES = ("dense", "t-sr-ste", "t-sr-ste-6e-3")


class Section(NamedTuple):
    """A picture, what it shows, and a table of variants."""

    title: str
    image: str
    alt: str
    text: str
    variants: tuple[str, ...]
    columns: tuple[Column, ...]


SECTIONS = (
    Section(
        "Predicted and actual descent",
        "descent-predicted",
        "Actual against predicted descent of each measured step, for dense training, ste and s-ste, and the share of "
        "steps up to x",
        "Each point is a step (seed 0): what the gradient says that it gains on its own batch, and what it gained. On\n"
        "the line both are equal. The error is the mean size of actual less predicted, over the mean size of actual.\n"
        "*Pruned* predicts by the change of the weights that the GEMMs see instead of that of the dense weights: no\n"
        "straight-through estimate is in it.",
        ROWS,
        (
            ("correlation", correlation, ".3f"),
            ("actual over predicted, sums", gained, ".2f"),
            ("error", lambda run: error(run, "predicted"), ".2f"),
            ("error, pruned", lambda run: error(run, "predicted_pruned"), ".2f"),
            ("steps that ascend", ascents, ".1%"),
            ("validation loss", lambda run: run["eval_loss"], ".3f"),
        ),
    ),
    Section(
        "What flips do to the loss",
        "descent-flips",
        "Change of the loss with the mask updated against that with the mask of before, for ste, t-sr-ste and s-ste",
        "Change of the loss of the batch with the new mask and with the mask of before (the papers' dF1 and dF2):\n"
        "below zero it descends. The share of flips is the mean size of the difference over the mean size of dF2;\n"
        "with signs, it is above zero where flips lower the loss.",
        (*ROWS[1:], *TILES[1:]),
        (
            ("share of flips", by_flips, ".2%"),
            ("with signs", gain_of_flips, "+.2%"),
            ("with signs, last third", lambda run: gain_of_flips(run, 1 / 3), "+.2%"),
            ("descends with the old mask, ascends with the new", wrong, ".1%"),
        ),
    ),
    Section(
        "Flips against the gap",
        "flips-by-gap",
        "How often the mask of a 4 x 4 tile flipped against its L1 gap, for dense training with virtual masks and "
        "t-sr-ste with two decays",
        "A tile's gap is the L1 norm that its best transposable pattern keeps, less that of the second best, at the\n"
        "end of the run. Flips are counted from refresh to refresh; two patterns differ in at least 4 of 16 entries.\n"
        "Lines are means of tenths. Flip rates are per refresh, of {refresh} steps.",
        TILES,
        (
            ("rank correlation", lambda run: run["tiles"]["correlation"], ".2f"),
            ("flips in the tenth of smallest gap", lambda run: run["tiles"]["tenths"][0][1], ".1f"),
            ("of largest", lambda run: run["tiles"]["tenths"][-1][1], ".1f"),
            ("tiles that never flip", lambda run: run["tiles"]["never"], ".1%"),
            ("highest flip rate", lambda run: max(flip_rates(run)), ".3f"),
            ("last", lambda run: flip_rates(run)[-1], ".3f"),
        ),
    ),
    Section(
        "Flip rates and those of dense training",
        "flips-dense",
        "Flip rate by step of dense training with virtual masks next to ste, sr-ste and s-ste, and next to t-sr-ste "
        "with two decays",
        "Dense weights have no mask; a virtual one is what they would have. The papers call a run healthy whose flip\n"
        "rate rises and then fades, as that of dense training does.",
        ROWS,
        (
            ("highest flip rate per step", lambda run: max(run["points"]["flip_rate"]), ".4f"),
            ("mean", lambda run: statistics.mean(run["points"]["flip_rate"]), ".4f"),
            ("last", lambda run: run["points"]["flip_rate"][-1], ".1e"),
        ),
    ),
)


def of_variant(runs: list[Run], variant: str) -> dict[int, Run]:
    return {run["seed"]: run for run in runs if run["variant"] == variant}


def table(runs: list[Run], variants: tuple[str, ...], columns: tuple[Column, ...]) -> str:
    lines = []
    for variant in variants:
        found = of_variant(runs, variant).values()
        cells = []
        for _, value, form in columns:
            values = [value(run) for run in found]
            each = ", ".join(f"{one:{form}}" for one in values)
            cells.append(f"{statistics.mean(values):{form}} [{each}]")
        lines.append([f"`{variant}`", *cells])
    return markdown_table(["variant", *(title for title, _, _ in columns)], lines)


def claims(runs: list[Run]) -> str:
    """Each claim, and whether it holds in every seed, in none, or in some."""

    def less(measure: Callable[[Run], float], lower: str, higher: str) -> list[bool]:
        one, other = of_variant(runs, lower), of_variant(runs, higher)
        return [measure(one[seed]) < measure(other[seed]) for seed in one if seed in other]

    def last_rate(run: Run) -> float:
        return flip_rates(run)[-1]

    tiles = [run for run in runs if run["tiles"]]
    checks = [
        ("Hard thresholds predict worse than dense training does", less(lambda r: -correlation(r), "dense", "ste")),
        ("S-STE predicts better than a hard threshold", less(lambda r: -correlation(r), "s-ste", "ste")),
        ("S-STE has fewer steps that ascend than a hard threshold", less(ascents, "s-ste", "ste")),
        ("Flips change the loss less with S-STE than with a hard threshold", less(by_flips, "s-ste", "ste")),
        (
            "With a hard threshold, steps that would descend ascend because masks flip",
            [wrong(run) > 0.01 for run in of_variant(runs, "ste").values()],
        ),
        (
            "With a hard threshold, flips raise the loss on the whole",
            [gain_of_flips(run) < 0 for run in of_variant(runs, "ste").values()],
        ),
        (
            "Where masks are refreshed every 40 steps, refreshes raise the loss",
            [gain_of_flips(run) < 0 for run in of_variant(runs, "t-sr-ste").values()],
        ),
        ("Tiles of small gap flip more", [run["tiles"]["correlation"] < -0.1 for run in tiles]),
        (
            "The flip rate of dense training rises, then fades",
            [fades(run["points"]["flip_rate"]) for run in of_variant(runs, "dense").values()],
        ),
        ("Masks of `t-sr-ste` end calmer with more decay", less(last_rate, "t-sr-ste-6e-3", "t-sr-ste")),
        ("With the default decay, `t-sr-ste` ends at more flips than dense", less(last_rate, "dense", "t-sr-ste")),
    ]
    words = {(True,): "seen", (False,): "**not seen**", (False, True): "**seeds differ**"}
    return markdown_table(["claim", "here"], [[claim, words[tuple(sorted(set(seen)))]] for claim, seen in checks])


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    (root / "docs/measured/analysis.md").write_text(page(root / "recipes/results/analysis.json"))
