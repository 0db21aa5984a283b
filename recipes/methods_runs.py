"""The runs of `compare_methods.py` as its search, its page and the site's figures read them.

There may be any of them: a variant may lack seeds or be missing, and a search may have tried any learning rates.
"""

import json
import math
from pathlib import Path
from typing import Any

from arguments import UsageError

EMBEDDING_RATE = 5e-3
"""Learning rate of the embeddings and the head in all runs."""

Run = dict[str, Any]
"""What `compare_methods.run` returns, one JSON file each."""


RATE_OF = {
    "ste": "sr-ste",
    "fixed-mask-late": "dense",
    "s-ste-greedy": "s-ste",
    "s-ste-mvue-weight": "s-ste",
    "s-ste-scale-each-step": "s-ste",
    "s-ste-gamma-0.5": "s-ste",
    "step-paper": "step",
    "ast-decay-6e-3": "ast",
    "cast-decay-1e-3": "cast",
}
"""Variants that take the learning rate of another instead of a search of their own."""


def read_runs(directory: Path) -> list[Run]:
    """What the JSON files of finished runs hold.

    Raises:
        UsageError: runs of different models, or of different lengths.
    """
    paths = sorted(directory.glob("*.json"))
    runs = [json.loads(path.read_text()) for path in paths]
    for path, run in zip(paths, runs):
        for key in ("parameters", "tokens"):
            if run[key] != runs[0][key]:
                raise UsageError(
                    f"{path}: a run with {run[key]:,} {key}, {paths[0].name} has {runs[0][key]:,}; delete one of them, "
                    f"or name another directory with --results"
                )
    return runs


def search(runs: list[Run], variant: str) -> dict[float, float]:
    """Validation loss of seed 0 by learning rate, lowest rate first."""
    tried = [run for run in runs if (run["variant"], run["seed"]) == (variant, 0)]
    return dict(sorted((run["learning_rate"], run["eval_loss"]) for run in tried))


def best_rate(losses: dict[float, float]) -> float:
    """The learning rate of the lowest loss; a run that diverged to NaN is the worst."""
    return min(losses, key=lambda rate: (math.isnan(losses[rate]), losses[rate]))


def next_rate(losses: dict[float, float], rates: tuple[float, ...], start: tuple[float, ...]) -> float | None:
    """Which of `rates` a search tries next, from the validation losses so far; None once the best is inside."""
    if untried := [rate for rate in start if rate not in losses]:
        return untried[0]
    best = rates.index(best_rate(losses))
    return next((rate for rate in rates[max(best - 1, 0) : best + 2] if rate not in losses), None)


def best_runs(runs: list[Run], variant: str) -> dict[int, Run]:
    """The runs at the variant's best learning rate by seed; none where seed 0 has none."""
    losses = search(runs, variant)
    rate = best_rate(losses) if losses else None
    found = [run for run in runs if (run["variant"], run["learning_rate"]) == (variant, rate)]
    return {run["seed"]: run for run in sorted(found, key=lambda run: run["seed"])}


def gaps(better: dict[int, Run], worse: dict[int, Run]) -> list[float]:
    """Validation loss of `worse` over that of `better`, for each seed that both have."""
    return [worse[seed]["eval_loss"] - run["eval_loss"] for seed, run in better.items() if seed in worse]


def curve(found: dict[int, Run], key: str) -> list[tuple[int, tuple[float, ...]]]:
    """Each step and what the seeds logged there; steps where one has no value are left out."""
    steps = next(iter(found.values()))["steps"] if found else []
    logged = zip(*(run[key] for run in found.values()))
    return [(step, values) for step, values in zip(steps, logged) if None not in values]


def training_gaps(found: dict[int, Run], dense: dict[int, Run]) -> list[tuple[int, tuple[float, ...]]]:
    """Training loss over that of the dense run by step, seed by seed. Without the first quarter: differences there come
    from the learning rates, and would hide what follows."""
    both = {seed: run for seed, run in found.items() if seed in dense}
    controls = curve({seed: dense[seed] for seed in both}, "loss")
    differences = [
        (step, tuple(a - b for a, b in zip(mine, theirs)))
        for (step, mine), (_, theirs) in zip(curve(both, "loss"), controls)
    ]
    return [(step, values) for step, values in differences if step > differences[-1][0] / 4]
