"""Every method on the same small model and text, each at its best learning rate: `results/methods.md`.

    make methods                                  # all runs that are missing, then the page
    python recipes/compare_methods.py --shard 0/2   # every second method; --shard 1/2, elsewhere: the others
    python recipes/compare_methods.py --only s-ste  # these methods alone
    python recipes/compare_methods.py --report      # only the page, from the runs that are there

Seed 0 finds each method's learning rate: it goes up or down the grid of `LEARNING_RATES` from the three it starts with
until the best has a worse one on either side. The other seeds then run at the best. One JSON per run in
`results/methods/`; a run that has one is not repeated, so the work can be cut into pieces.

What is searched is the learning rate of the hidden layers. That of the embeddings and the head is the same for all.
With one rate for everything the dense control loses to a mask of random weights: Adam moves every entry by about the
learning rate, a masked layer has half of the entries, and moving less far is what the hidden layers need and the
embeddings do not (`LOG.md`, 2026-11-22).
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import methods_page
import stdlib_text
import torch
import train
from arguments import UsageError, parse_arguments
from methods_runs import EMBEDDING_RATE, RATE_OF, best_rate, next_rate, read_runs, search
from running import evaluate_text, train_and_save, versions, whole_checkpoint
from running import run as run_script
from torch.optim import Optimizer
from transformers import Trainer

from hf_sparse24 import sparse_weights
from hf_sparse24.progress import Progress

RECIPES = Path(__file__).resolve().parent
RESULTS = RECIPES / "results" / "methods"
SEEDS = (0, 1, 2)
LEARNING_RATES = (4e-4, 6.3e-4, 1e-3, 1.6e-3, 2.5e-3, 4e-3, 6.3e-3, 1e-2)
START = LEARNING_RATES[3:6]
START_OF = {"ast": LEARNING_RATES[1:4]}
"""AdamS takes longer steps at the same rate."""
ABLATIONS = (
    "s-ste-greedy",
    "s-ste-mvue-weight",
    "s-ste-moving-scale",
    "s-ste-gamma",
    "s-ste-fixed-scale",
    "dense-weight",
)
MODULE_OF = {"ast": "methods.ast"} | dict.fromkeys(ABLATIONS, "ablations")
"""Modules of the methods that are not in the package."""

# Each variant's method and how it differs from the method's defaults.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "fixed-mask": ("fixed-mask", {}),
    "s-ste": ("s-ste", {}),
    "sr-ste": ("sr-ste", {}),
    "t-sr-ste": ("t-sr-ste", {}),
    "step": ("step", {}),
    "ste": ("ste", {}),
    "ast": ("ast", {}),
    "slope": ("slope", {}),
    "fixed-mask-late": ("fixed-mask", {"dense_start": 0.5}),
    "s-ste-greedy": ("s-ste-greedy", {}),
    "s-ste-mvue-weight": ("s-ste-mvue-weight", {}),
    "s-ste-scale-each-step": ("s-ste-moving-scale", {}),
    "s-ste-gamma-0.5": ("s-ste-gamma", {"gamma": 0.5}),
    "step-paper": ("step", {"update_clip": 0.0}),
    "ast-decay-6e-3": ("ast", {"masked_decay": 6e-3}),
}


@cache
def rate_of(method: str) -> float:
    """The best learning rate in `results/methods`."""
    return best_rate(search(read_runs(RESULTS), method))


def missing(variant: str, found: list[dict[str, Any]]) -> Iterator[tuple[float, int]]:
    """Learning rates and seeds of the runs that `variant` lacks and that can start now.

    Args:
        found: the runs there are, of any variant.
    """
    source = RATE_OF.get(variant, variant)
    tried = search(found, source)
    rate = next_rate(tried, LEARNING_RATES, START_OF.get(source, START))
    if rate is None:
        best = best_rate(tried)
        done = {run["seed"] for run in found if (run["variant"], run["learning_rate"]) == (variant, best)}
        yield from ((best, seed) for seed in SEEDS if seed not in done)
    elif source == variant:
        yield rate, 0


def run(
    variant: str,
    rate: float,
    seed: int,
    data: str,
    steps: int | None = None,
    variants: Mapping[str, tuple[str, dict[str, Any]]] = VARIANTS,
    flags: Mapping[str, Any] | None = None,
    watch: Callable[[Trainer], None] | None = None,
) -> dict[str, Any]:
    """Train one model and return what its JSON holds.

    Args:
        flags: of `train.py`, after all others. With an `output_dir`, a run goes on from the last checkpoint in it.
        watch: called with the trainer before it trains.
    """
    method, settings = variants[variant]
    with tempfile.TemporaryDirectory() as output:
        given = {
            "dataset": f"{data}/train.jsonl",
            "validation_file": f"{data}/validation.jsonl",
            "tokenizer_name": f"{data}/tokenizer",
            "method": method,
            **({"method_module": MODULE_OF[method]} if method in MODULE_OF else {}),
            "sparse24": json.dumps(settings),
            "learning_rate": rate,
            "seed": seed,
            "output_dir": output,
        }
        if steps is not None:
            given |= {"max_steps": steps, "logging_steps": 5}
        argv = [f"{RECIPES}/methods.yaml", *(f"--{key}={value}" for key, value in (given | dict(flags or {})).items())]
        trainer = train.make_trainer(*parse_arguments(train.ARGUMENTS, argv))
        trainer.create_optimizer = partial(_create_optimizer, trainer, trainer.create_optimizer)
        if watch is not None:
            watch(trainer)
        train_and_save(trainer, whole_checkpoint(trainer.args.output_dir))
        evaluate_text(trainer)
    logs = trainer.state.log_history
    training = [log for log in logs if "loss" in log]
    args = trainer.args
    return {
        "variant": variant,
        "learning_rate": rate,
        "seed": seed,
        "eval_loss": next(log["eval_loss"] for log in logs if "eval_loss" in log),
        "train_seconds": next(log["train_runtime"] for log in logs if "train_runtime" in log),
        "steps": [log["step"] for log in training],
        "loss": [log["loss"] for log in training],
        "flip_rate": [log.get("flip_rate") for log in training],
        "model": trainer.model.config.model_type,
        "parameters": trainer.model.num_parameters() - _beside(trainer.model),
        "tokens": args.max_steps * args.train_batch_size * len(trainer.train_dataset[0]["input_ids"]),
        "sparse24": getattr(getattr(trainer.model.config, "quantization_config", None), "to_dict", dict)(),
        "arguments": {
            name: getattr(args, name) for name in ("max_steps", "weight_decay", "adam_beta2", "warmup_steps")
        },
        "versions": versions(),
        "device": f"{args.device.type}, threads: {torch.get_num_threads()}",
    }


def _beside(model: torch.nn.Module) -> int:
    """How many parameters a method trains besides those of the model."""
    return sum(tensor.numel() for weight in sparse_weights(model).values() for tensor in weight.parameters.values())


def _create_optimizer(trainer: Trainer, create: Callable[..., Optimizer], *args: Any) -> Optimizer:
    """What `create` makes, with the embeddings and the head in groups of their own, at `EMBEDDING_RATE`."""
    optimizer = create(*args)
    ends = [trainer.model.get_input_embeddings().weight, trainer.model.get_output_embeddings().weight]
    for group in list(optimizer.param_groups):
        found = [parameter for parameter in group["params"] if any(parameter is end for end in ends)]
        if found:
            group["params"] = [p for p in group["params"] if all(p is not end for end in ends)]
            optimizer.add_param_group({**group, "params": found, "lr": EMBEDDING_RATE})
    return optimizer


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", default="0/1", help="which part of the variants, as 0/2; default: all")
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), choices=VARIANTS, help="only these variants")
    parser.add_argument("--report", action="store_true", help="no runs, only the page")
    parser.add_argument("--steps", type=int, default=None, help="shorter runs, to try things out")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the runs' JSON")
    parser.add_argument("--data", default="runs/stdlib_text", help="directory of the text and its tokenizer")
    args = parser.parse_args(argv)
    if args.steps is not None and args.results == RESULTS:
        raise UsageError("--steps: short runs would count as done among the others; name a directory with --results")
    args.results.mkdir(parents=True, exist_ok=True)
    index, count = (int(part) for part in args.shard.split("/"))
    variants = args.only[index::count]
    if not args.report:
        stdlib_text.prepare(args.data)
        with Progress("runs", None, "run", partial(print, flush=True)) as progress:
            while chosen := _next_run(variants, read_runs(args.results)):
                variant, rate, seed = chosen
                name = f"{variant}-lr{rate:g}-seed{seed}"
                progress.update(0, name)
                result = run(variant, rate, seed, args.data, args.steps)
                print(f"{name}: {result['eval_loss']:.4f} in {result['train_seconds']:.0f} s", flush=True)
                stdlib_text.replace_file(args.results / f"{name}.json", json.dumps(result) + "\n")
                progress.update()
    runs = read_runs(args.results)
    if not args.report:
        for variant in variants:
            if variant in RATE_OF and not search(runs, variant):
                print(f"{variant}: waits for the search of {RATE_OF[variant]}; run the same again when that is done")
    if not runs:
        raise UsageError(f"{args.results}: no runs; `make methods` makes them")
    page = (args.results.parent if args.results == RESULTS else args.results) / "methods.md"
    stdlib_text.replace_file(page, methods_page.page(runs))
    print(page)


def _next_run(variants: list[str], found: list[dict[str, Any]]) -> tuple[str, float, int] | None:
    """The run to do now: searches before further seeds."""
    waiting = [(variant, rate, seed) for variant in variants for rate, seed in missing(variant, found)]
    return min(waiting, key=lambda run: run[2], default=None)


if __name__ == "__main__":
    run_script(main)
