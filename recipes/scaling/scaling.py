"""Does the gap to dense training close with size? Llamas of four sizes, each method, one JSON a run.

    python recipes/scaling/scaling.py                 # the runs that the results lack, the smallest first
    python recipes/scaling/scaling.py --sizes 0.46M 1.6M --only dense s-ste
    python recipes/scaling/scaling.py --list

Each model sees about nine tokens a parameter of the text of `corpus.py`. Its MLPs are sparse. A step has 1,024 tokens,
computed by compiled code: in bf16 on a CPU that multiplies bf16, else in fp32. `results/methods` found the learning
rates at 0.46M parameters. A wider model takes them times 64 / width, the rule of Adam's hidden layers (muP, arXiv
2203.03466); embeddings and head keep theirs. At 1.6M, dense and `s-ste` also run at 1.6 times that rate, to check the
rule. A run that was interrupted goes on from its last checkpoint.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

# ruff: noqa: E402 (imports come after the path that they need)
ROOT = Path(__file__).resolve().parents[2]
sys.path[:1] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "recipes")]

import compare_methods
import torch
from running import run as run_script
from transformers import Trainer

from hf_sparse24.progress import Progress
from recipes.scaling import corpus
from recipes.stdlib_text import replace_file

RESULTS = ROOT / "recipes/results/scaling"
SAVED_EVERY = 1000  # steps
WIDTH = 64  # of the model that the learning rates were found for


def dtype() -> str:
    """What matrices are multiplied in; without AVX-512 BF16, bf16 takes ten times as long as fp32."""
    return "bf16" if torch.cpu._is_avx512_bf16_supported() else "fp32"


@dataclass(frozen=True)
class Size:
    width: int
    mlp: int
    layers: int
    steps: int

    @property
    def flags(self) -> dict[str, Any]:
        """Of train.py."""
        heads = self.width // 16 if self.width < 128 else self.width // 32
        config = {"hidden_size": self.width, "intermediate_size": self.mlp, "num_hidden_layers": self.layers}
        config |= {"num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": 128}
        config |= {"_attn_implementation": "eager"}  # with bf16 and torch.compile, a step takes 0.65 of the time
        flags = {"config_overrides": json.dumps(config), "bf16": dtype() == "bf16", "torch_compile": True}
        return flags | {"max_steps": self.steps, "logging_steps": self.steps // 80}


SIZES = {
    "0.46M": Size(64, 256, 3, 4_000),
    "1.6M": Size(128, 384, 5, 14_000),
    "3M": Size(192, 512, 5, 26_000),
    "5.5M": Size(256, 832, 5, 48_000),
}
HALF = "dense half"
"""The control with as many weights in its MLPs as the sparse models have that are not zero."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "s-ste": ("s-ste", {}),
    "t-sr-ste": ("t-sr-ste", {}),
    "sr-ste": ("sr-ste", {}),
    "s-ste 16:32": ("s-ste", {"pattern": "16:32"}),
    HALF: ("dense", {}),
}
SEEDS = (0, 1, 2)
CHECKED = ("dense", "s-ste")


@dataclass(frozen=True)
class Run:
    size: str
    variant: str
    seed: int
    factor: float = 1.0  # of the rule's learning rate

    @property
    def name(self) -> str:
        checked = f"-rate-x{self.factor:g}" if self.factor != 1 else ""
        return f"{self.size}-{self.variant.replace(' ', '-').replace(':', '-')}{checked}-seed{self.seed}"

    @property
    def rate(self) -> float:
        rate = compare_methods.rate_of(VARIANTS[self.variant][0])
        return float(f"{rate * WIDTH / SIZES[self.size].width * self.factor:.3g}")


def runs() -> Iterator[Run]:
    """All runs, the smallest sizes first."""
    for size in SIZES:
        small = size in ("0.46M", "1.6M")
        for seed in SEEDS if small else SEEDS[:1]:
            yield from (Run(size, variant, seed) for variant in VARIANTS if small or variant != HALF)
        if size == "1.6M":
            yield from (Run(size, variant, 1, 1.6) for variant in CHECKED)


def fits(run: Run, results: Path) -> bool:
    """Whether the run would have the dtype of its dense control, if that is there."""
    control = results / f"{Run(run.size, 'dense', run.seed).name}.json"
    if not control.exists() or json.loads(control.read_text())["dtype"] == dtype():
        return True
    print(f"{run.name}: its dense control is there in another dtype than this CPU's {dtype()}", file=sys.stderr)
    return False


def train(run: Run, data: Path, watch: Callable[[Trainer], None] | None = None, **flags: Any) -> dict[str, Any]:
    """What the JSON of a run holds; `flags` of train.py come after those of its size."""
    size = SIZES[run.size]
    size = replace(size, mlp=size.mlp // 2) if run.variant == HALF else size
    flags = size.flags | {"save_strategy": "steps", "save_steps": SAVED_EVERY, "save_total_limit": 1} | flags
    found = compare_methods.run(run.variant, run.rate, run.seed, str(data), None, VARIANTS, flags, watch)
    del found["train_seconds"]  # of the part since the last checkpoint
    return found | {"size": run.size, "factor": run.factor, "dtype": dtype()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="these variants alone")
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=list(SEEDS), help="these seeds alone")
    parser.add_argument("--list", action="store_true", help="print the runs that are missing, and stop")
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--data", type=Path, default=Path("runs/python_sources"), help="default: %(default)s")
    parser.add_argument("--steps", type=int, help="shorter runs, to try things out: needs another --results")
    args = parser.parse_args(argv)
    if args.steps and args.results == RESULTS:
        parser.error("--steps: short runs would count as done among the others; name a folder with --results")
    wanted = [run for run in runs() if run.size in args.sizes and run.variant in args.only and run.seed in args.seeds]
    missing = [run for run in wanted if not (args.results / f"{run.name}.json").exists()]
    missing = [run for run in missing if fits(run, args.results)]
    if args.list:
        print(*(f"{run.name}, learning rate {run.rate:g}" for run in missing), sep="\n")
        return
    args.results.mkdir(parents=True, exist_ok=True)
    corpus.prepare(args.data)
    with Progress("runs", len(missing), "run", partial(print, flush=True)) as progress:
        for run in missing:
            progress.update(0, run.name)
            flags = {"max_steps": args.steps} if args.steps else {}
            output = args.data.parent / "scaling" / (f"{args.steps} steps" if args.steps else "") / run.name
            found = train(run, args.data, output_dir=str(output), **flags)
            print(f"{run.name}: {found['eval_loss']:.4f}", flush=True)
            replace_file(args.results / f"{run.name}.json", json.dumps(found) + "\n")
            replace_file(args.results / "sources.json", (args.data / "sources.json").read_text())
            progress.update()


if __name__ == "__main__":
    run_script(main)
