"""Short runs that try what the papers' abstracts claim: one JSON each in `results/claims/`, a page of all verdicts.

    python recipes/claims.py                          # the runs that the results lack, in order
    python recipes/claims.py --only step mvue         # these groups alone
    python recipes/claims.py --only step-1-16-seed0   # one run
    python recipes/claims.py --list

The small Llama and the text of `compare_methods.py`, 600 steps of 1,024 tokens unless a run says otherwise, each method
at the learning rate that `results/methods` found for it. A run that has its file is not repeated, so the work can be
cut into pieces. `docs/claims_page.py` makes the page of the rows in `results/claims/rows.yaml`, and computes verdicts
on losses from these files.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import compare_methods
import stdlib_text
import torch
from running import run as run_script
from transformers import Trainer, TrainerCallback

from hf_sparse24 import sparse_weights
from hf_sparse24.progress import Progress

RESULTS = Path(__file__).resolve().parent / "results" / "claims"
STEPS = 600
LOGGED = 20
RATIOS = ("2:4", "1:4", "1:8", "1:16")
HALVES = ("1:2", "2:4", "4:8")
KEPT_LONG = {"masked_decay": 0, "dense_tail": 0, "weight_grad": "dense"}
"""Masks of Hubara et al. by `t-sr-ste`: refreshed every 40 steps, and nothing else."""


@dataclass(frozen=True)
class Run:
    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    like: str = ""
    """The method whose learning rate it takes; empty: its own."""
    flags: dict[str, Any] = field(default_factory=dict)
    """Of train.py."""
    steps: int = STEPS
    seeds: tuple[int, ...] = (0,)


def _groups() -> dict[str, dict[str, Run]]:
    """The runs by paper, then by name."""
    step, s_ste, t_sr_ste, mvue, masks = ({} for _ in range(5))
    for ratio in RATIOS:
        seeds = (0, 1) if ratio == "2:4" else (0,)
        both = (0, 1) if ratio in ("2:4", "1:16") else (0,)
        name, pattern = ratio.replace(":", "-"), {"pattern": ratio}
        step[f"step-{name}"] = Run("step", pattern, "step", seeds=(0, 1))
        step[f"sr-ste-{name}"] = Run("sr-ste", pattern, "step", seeds=seeds)
        step[f"ste-{name}"] = Run("ste", pattern, "step", seeds=seeds)
        step[f"asp-{name}"] = Run("fixed-mask", pattern | {"dense_start": 0.5}, "step", seeds=(0, 1))
        step[f"ste-late-{name}"] = Run("ste", pattern | {"dense_start": 0.5}, "step", seeds=both)
    for share in (0.1, 0.25, 0.75):
        step[f"step-at-{share}"] = Run("step", {"switch_after": share, "switch_by": share})
    for way in ("dense", "step", "sr-ste"):  # the variance's memory that the paper has: 1,000 steps in place of 20
        pattern = {} if way == "dense" else {"pattern": "1:16"}
        step[f"{way}-1-16-beta2-0.999"] = Run(way, pattern, "step", flags={"adam_beta2": 0.999})
    step["step-geometric"] = Run("step", {"switch_rule": "geometric"})
    for epsilon in (1e-7, 1e-6):
        step[f"step-eps-{epsilon:g}"] = Run("step", {}, flags={"adam_epsilon": epsilon})
    start = {"dense_tail": 0, "dense_start": 1 / 6}
    t_sr_ste["t-sr-ste"] = Run("t-sr-ste")
    t_sr_ste["t-sr-ste-no-tail"] = Run("t-sr-ste", {"dense_tail": 0})
    t_sr_ste["t-sr-ste-dense-start"] = Run("t-sr-ste", start)
    for decay in (0, 6e-4, 6e-3, 2e-2, 6e-2, 2e-1):
        seeds = (0, 1) if decay == 6e-3 else (0,)
        t_sr_ste[f"t-sr-ste-gradient-{decay:g}"] = Run("t-sr-ste", {"masked_decay": decay}, seeds=seeds)
    for decay in (6e-3, 1e-1, 1.0, 10.0):
        t_sr_ste[f"t-sr-ste-weight-{decay:g}"] = Run("t-sr-ste", {"masked_decay": decay, "decay_on": "weight"})
    by_rule = {"masked_decay": 6e-3}
    changes = {"no-tail": {"dense_tail": 0}, "dense-start": start, "no-mvue": {"weight_grad": "dense"}}
    for name, change in changes.items():
        seeds = (0,) if name == "dense-start" else (0, 1)
        t_sr_ste[f"t-sr-ste-6e-3-{name}"] = Run("t-sr-ste", by_rule | change, seeds=seeds)
    like_theirs = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": '{"min_lr_rate": 0.0667}'}
    for name, change in {"": {}, "-no-tail": {"dense_tail": 0}}.items():
        t_sr_ste[f"t-sr-ste-6e-3-min-lr{name}"] = Run("t-sr-ste", by_rule | change, flags=like_theirs, seeds=(0, 1))
    s_ste["s-ste"] = Run("s-ste", seeds=(0, 1))
    s_ste["s-ste-none"] = Run("s-ste", {"scale_rule": "none"}, seeds=(0, 1))
    s_ste["s-ste-l1"] = Run("s-ste", {"scale_rule": "l1"})
    for scale in (0.5, 2.0, 3.0):
        s_ste[f"s-ste-scale-{scale:g}"] = Run("s-ste-fixed-scale", {"scale": scale}, "s-ste")
    s_ste["s-ste-moving"] = Run("s-ste-moving-scale", {}, "s-ste", seeds=(0, 1))
    s_ste["s-ste-no-mvue"] = Run("s-ste", {"weight_grad": "dense"}, seeds=(0, 1))
    s_ste["s-ste-fp8"] = Run("s-ste", {"fp8": True}, seeds=(0, 1))
    for estimate in ("mvue", "mvue-approx", "mvue-1:2"):
        mvue[estimate.replace(":", "-")] = Run("dense-weight", {"weight_grad": estimate}, "dense", seeds=(0, 1))
    mvue["greedy"] = Run("dense-weight", {"estimators": "greedy-gradients"}, "dense", seeds=(0, 1))
    both = {"weight_grad": "mvue", "input_grad": "mvue"}
    mvue["mvue-both"] = Run("dense-weight", both, "dense", seeds=(0, 1))
    mvue["activations-mse"] = Run("dense-weight", {"activations": "2:4"}, "dense", seeds=(0, 1))
    mvue["activations-mvue"] = Run("dense-weight", {"estimators": "mvue-activations"}, "dense")
    mvue["mvue-fp8"] = Run("dense-weight", {"weight_grad": "mvue", "fp8": True}, "dense", seeds=(0, 1))
    for half in HALVES:
        name, pattern = half.replace(":", "-"), {"pattern": half}
        masks[f"transposable-{name}"] = Run("t-sr-ste", pattern | KEPT_LONG, "step", seeds=(0, 1))
    three = {"pattern": "4:8"} | KEPT_LONG | {"weight_grad": "mvue"}
    masks["transposable-4-8-mvue"] = Run("t-sr-ste", three, "step", seeds=(0, 1))
    long = {"long-t-sr-ste-6e-3": Run("t-sr-ste", by_rule, steps=4000)}
    long["long-s-ste-none"] = Run("s-ste", {"scale_rule": "none"}, steps=4000)
    for method in ("step", "sr-ste"):
        long[f"long-{method}-1-16"] = Run(method, {"pattern": "1:16"}, "step", steps=4000)
    dense = {"dense": Run("dense", flags={"flips_of": "t-sr-ste"}, seeds=(0, 1))}
    groups = {"dense": dense, "mvue": mvue, "s-ste": s_ste, "masks": masks, "t-sr-ste": t_sr_ste}
    return groups | {"step": step, "long": long}


GROUPS = _groups()


def cells() -> Iterator[tuple[str, str, Callable[[str], dict[str, Any]]]]:
    """Group and name of each run, and what makes its result from the directory of the text; first seeds first."""

    def trained(seed: int, long: bool) -> Iterator[tuple[str, str, Callable[[str], dict[str, Any]]]]:
        for group, runs in GROUPS.items():
            for name, run in runs.items():
                if seed in run.seeds and (group == "long") == long:
                    yield group, f"{name}-seed{seed}", partial(measure, name, run, seed)

    for seed, long in ((0, False), (0, True), (1, False)):
        yield from trained(seed, long)


def short(value: float) -> float:
    """The value with four digits."""
    return float(f"{value:.4g}")


class Watch(TrainerCallback):
    """Keeps the mean and the geometric mean of Adam's second moment over the MLPs' weights, whenever training logs."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.points: list[tuple[int, float, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" not in logs:
            return
        optimizer = self.trainer.optimizer
        moments = optimizer.state if hasattr(optimizer, "state") else {}
        frozen = getattr(optimizer, "optimizer", optimizer)
        switched = getattr(frozen, "switched", False)  # then the variance is corrected already
        correction = 1 if switched else 1 - args.adam_beta2**state.global_step
        found = [
            moments[p]["exp_avg_sq"].flatten()
            for name, p in self.trainer.model.named_parameters()
            if ".mlp." in name and p in moments
        ]
        if found:
            variance = torch.cat(found) / correction
            means = variance.mean().item(), variance.clamp(min=1e-30).log().mean().exp().item()
            self.points.append((state.global_step, *map(short, means)))


def measure(name: str, run: Run, seed: int, data: str, *, steps: int | None = None) -> dict[str, Any]:
    """Train one model and return what its JSON holds: what `compare_methods.run` returns, and what the claims need."""
    watches: list[Watch] = []

    def watch(trainer: Trainer) -> None:
        watches.append(Watch(trainer))
        trainer.add_callback(watches[0])

    steps = steps or run.steps
    flags = {"logging_steps": max(1, steps * LOGGED // STEPS)} | run.flags
    variants = {name: (run.method, run.settings)}
    rate = compare_methods.rate_of(run.like or run.method)
    result = compare_methods.run(name, rate, seed, data, steps, variants, flags, watch)
    (watched,) = watches
    model, optimizer = watched.trainer.model, watched.trainer.optimizer
    result["loss"] = [short(value) for value in result["loss"]]
    result["flip_rate"] = [value and short(value) for value in result["flip_rate"]]
    result["method"], result["settings"], result["flags"] = run.method, run.settings, flags
    result["variance"] = watched.points
    result["switch_step"] = getattr(getattr(optimizer, "optimizer", optimizer), "switch_step", None)
    logs = watched.trainer.state.log_history
    result["switch_statistic"] = [(x["step"], short(x["switch_statistic"])) for x in logs if "switch_statistic" in x]
    scales = [float(weight.state["scale"]) for weight in sparse_weights(model).values() if "scale" in weight.state]
    result["scales"] = [short(scale) for scale in scales]
    return result


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="only these groups, or runs")
    parser.add_argument("--list", action="store_true", help="print the names of the runs, and which are there")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the runs' JSON")
    parser.add_argument("--data", default="runs/stdlib_text", help="directory of the text and its tokenizer")
    args = parser.parse_args(argv)
    chosen = [cell for cell in cells() if not args.only or {*cell[:2]} & {*args.only}]
    if not chosen:
        parser.error(f"--only {' '.join(args.only)}: names no group and no run; --list shows them")
    if args.list:
        print("\n".join(f"{name}  {'there' if _path(args, name).exists() else '-'}" for _, name, _ in chosen))
        return
    stdlib_text.prepare(args.data)
    args.results.mkdir(parents=True, exist_ok=True)
    with Progress("runs", len(chosen), "run") as progress:
        for _, name, make in chosen:
            if not _path(args, name).exists():
                progress.update(0, name)
                stdlib_text.replace_file(_path(args, name), json.dumps(make(args.data)) + "\n")
            progress.update()


def _path(args: argparse.Namespace, name: str) -> Path:
    return args.results / f"{name}.json"


if __name__ == "__main__":
    run_script(main)
