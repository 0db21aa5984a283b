"""Every method on the same small models and text, against the dense control: `results/methods.md`.

    make methods                                  # all runs that are missing, then the page
    python recipes/methods.py --shard 0/2         # every second run; the others by --shard 1/2, elsewhere or beside it
    python recipes/methods.py --only llama-s-ste  # runs whose name contains this
    python recipes/methods.py --report            # only the page, from the runs that are there

One JSON per run in `results/methods/`; a run that has one is not repeated, so the work can be cut into pieces.
"""

import argparse
import json
import platform
import statistics
import tempfile
from functools import partial
from pathlib import Path

import matplotlib
import stdlib_text
import torch
import train
import transformers

from hf_sparse24 import __version__
from hf_sparse24.progress import Progress

RECIPES = Path(__file__).resolve().parent
RESULTS = RECIPES / "results" / "methods"
SEEDS = (0, 1, 2)

_SIZES = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "initializer_range": 0.08}
MODELS = {
    "llama": _SIZES | {"intermediate_size": 384, "num_key_value_heads": 4, "max_position_embeddings": 128},
    "gpt2": {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 128, "initializer_range": 0.08}
    | {f"{part}_pdrop": 0.0 for part in ("resid", "embd", "attn")},
}
# Name of a variant, what it says in the table, and how it differs from the method's defaults.
VARIANTS = {
    "dense": ("dense", "the control", {}),
    "ste": ("ste", "straight-through", {}),
    "sr-ste": ("sr-ste", "decay 2e-4 on the gradient", {}),
    "t-sr-ste": ("t-sr-ste", "transposable, MVUE, decay 6e-5, dense tail of a sixth", {}),
    "t-sr-ste-no-tail": ("t-sr-ste", "the same without the tail", {"dense_tail": 0}),
    "s-ste": ("s-ste", "soft threshold, MVUE", {}),
    "s-ste-no-mvue": ("s-ste", "the same with the whole gradient", {"weight_grad": "dense"}),
    "s-ste-fp8": ("s-ste", "soft threshold, MVUE, FP8 simulated", {"fp8": True}),
    "step": ("step", "dense, then frozen variance and masks", {}),
    "fixed-mask": ("fixed-mask", "dense for the first half, then one mask", {"dense_start": 0.5}),
}
# What the papers found: (better, worse, source).
CLAIMS = [
    ("dense", "s-ste", "every paper: 2:4 costs something"),
    ("sr-ste", "ste", "SR-STE, section 3"),
    ("t-sr-ste", "t-sr-ste-no-tail", "Hu et al. 2024 (ICML), dense fine-tuning"),
    ("s-ste", "sr-ste", "S-STE, Table 6"),
    ("s-ste-no-mvue", "s-ste", "S-STE, Table 3: MVUE on dZ costs little"),
    ("step", "sr-ste", "STEP, with Adam"),
    ("s-ste", "fixed-mask", "all: dynamic masks beat a fixed one at equal budget"),
]


def run(model: str, variant: str, seed: int, data: str, steps: int | None = None) -> dict:
    """Train one model and return what its JSON holds."""
    method, _, settings = VARIANTS[variant]
    with tempfile.TemporaryDirectory() as output:
        flags = {
            "dataset": f"{data}/train.jsonl",
            "validation_file": f"{data}/validation.jsonl",
            "tokenizer_name": f"{data}/tokenizer",
            "model_type": model,
            "config_overrides": json.dumps(MODELS[model]),
            "method": method,
            "sparse24": json.dumps(settings),
            "seed": seed,
            "output_dir": output,
        }
        if steps is not None:
            flags |= {"max_steps": steps, "warmup_steps": steps // 10}
        trainer = train.main([f"{RECIPES}/methods.yaml", *(f"--{key}={value}" for key, value in flags.items())])
    logs = trainer.state.log_history
    training = [log for log in logs if "loss" in log]
    return {
        "model": model,
        "variant": variant,
        "seed": seed,
        "eval_loss": next(log["eval_loss"] for log in logs if "eval_loss" in log),
        "train_seconds": next(log["train_runtime"] for log in logs if "train_runtime" in log),
        "steps": [log["step"] for log in training],
        "loss": [log["loss"] for log in training],
        "flip_rate": [log.get("flip_rate") for log in training],
        "parameters": trainer.model.num_parameters(),
        "sparse24": getattr(getattr(trainer.model.config, "quantization_config", None), "to_dict", dict)(),
        "arguments": {name: getattr(trainer.args, name) for name in ("learning_rate", "max_steps", "weight_decay")},
        "versions": {
            "hf_sparse24": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "device": f"{trainer.args.device.type}, {torch.get_num_threads()} thread(s)",
    }


def report(directory: Path) -> str:
    """The page as Markdown, from every run in `directory`; its plots are written beside the page."""
    runs = [json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))]
    page = [
        "# Methods side by side\n",
        f"Made by `make methods` from {len(runs)} runs in `methods/`. "
        "Validation loss in nats per token: mean over seeds [lowest, highest]. All variants of a model see the same "
        "data in the same order. Flip rates are per step; for `t-sr-ste` per mask refresh, every 40 steps. The models "
        "are tiny and the runs short: this shows that each method trains, and what it costs "
        "here, not what it costs a model of useful size.\n",
    ]
    for model in MODELS:
        rows = {v: [r for r in runs if (r["model"], r["variant"]) == (model, v)] for v in VARIANTS}
        rows = {variant: found for variant, found in rows.items() if found}
        if "dense" not in rows:
            continue
        page += [*_table(model, rows), *_claims(rows), f"![loss and flip rate of {model}](methods-{model}.png)\n"]
        _plot(rows, directory.parent / f"methods-{model}.png")
    return "\n".join(page)


def _table(model: str, rows: dict[str, list[dict]]) -> list[str]:
    first = rows["dense"][0]
    dense = {r["seed"]: r for r in rows["dense"]}
    lines = [
        f"## {model}, {first['parameters']:,} parameters, {first['arguments']['max_steps']} steps of 1024 tokens\n",
        f"{first['device']}, torch {first['versions']['torch']}, transformers {first['versions']['transformers']}, "
        f"{len(rows['dense'])} seeds.\n",
        "| variant | what it is | validation loss | over dense | final flip rate | step time over dense |",
        "|---|---|---|---|---|---|",
    ]
    for variant, found in rows.items():
        losses = [r["eval_loss"] for r in found]
        paired = [r for r in found if r["seed"] in dense]
        over = statistics.mean(r["eval_loss"] - dense[r["seed"]]["eval_loss"] for r in paired)
        time = statistics.median(r["train_seconds"] / dense[r["seed"]]["train_seconds"] for r in paired)
        flips = [r["flip_rate"][-1] for r in found if r["flip_rate"][-1] is not None]
        flip = f"{statistics.mean(flips):.1e}" if flips else ""
        lines.append(
            f"| `{variant}` | {VARIANTS[variant][1]} | {statistics.mean(losses):.3f} [{min(losses):.3f}, "
            f"{max(losses):.3f}] | {over:+.3f} | {flip} | {time:.2f} |"
        )
    return [*lines, ""]


def _claims(rows: dict[str, list[dict]]) -> list[str]:
    """Which orderings of the papers appear here, judged seed by seed."""
    lines = ["Orderings that the papers report, and what is seen here:\n"]
    for better, worse, source in CLAIMS:
        if better not in rows or worse not in rows:
            continue
        other = {r["seed"]: r["eval_loss"] for r in rows[worse]}
        gaps = [other[r["seed"]] - r["eval_loss"] for r in rows[better] if r["seed"] in other]
        seen = (
            "seen" if min(gaps) > 0 else "**not seen**: the reverse" if max(gaps) < 0 else "**not seen**: seeds differ"
        )
        shown = ", ".join(f"{gap:+.3f}" for gap in gaps)
        lines.append(f"- `{better}` below `{worse}` ({source}): {seen} (by {shown})")
    return [*lines, ""]


def _plot(rows: dict[str, list[dict]], path: Path) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (losses, flips) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    colours = plt.get_cmap("tab10").colors
    for colour, (variant, found) in zip(colours, rows.items()):
        mean = [statistics.mean(values) for values in zip(*(r["loss"] for r in found))]
        losses.plot(found[0]["steps"], mean, label=variant, color=colour)
        points = [
            (step, statistics.mean(values))
            for step, values in zip(found[0]["steps"], zip(*(r["flip_rate"] for r in found)))
            if None not in values
        ]
        if points:
            flips.plot(*zip(*points), label=variant, color=colour)
    losses.set(xlabel="step", ylabel="training loss, mean over seeds")
    flips.set(xlabel="step", ylabel="flip rate (t-sr-ste: per mask refresh)")
    flips.set_yscale("symlog", linthresh=1e-4)
    losses.legend(fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", default="0/1", help="which part of the runs, as 0/2; default: all")
    parser.add_argument("--only", default="", help="only runs whose name contains this")
    parser.add_argument("--report", action="store_true", help="no runs, only the page")
    parser.add_argument("--steps", type=int, default=None, help="shorter runs, to try things out")
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the runs' JSON")
    parser.add_argument("--data", default="runs/stdlib_text", help="directory of the text and its tokenizer")
    args = parser.parse_args(argv)
    args.results.mkdir(parents=True, exist_ok=True)
    index, count = (int(part) for part in args.shard.split("/"))
    names = [(model, variant, seed) for seed in SEEDS for model in MODELS for variant in VARIANTS]
    if not args.report:
        stdlib_text.prepare(args.data)
        paths = {args.results / f"{'-'.join(name[:2])}-seed{name[2]}.json": name for name in names[index::count]}
        missing = {path: name for path, name in paths.items() if args.only in path.stem and not path.exists()}
        with Progress("runs", len(missing), "run", partial(print, flush=True)) as progress:
            for path, (model, variant, seed) in missing.items():
                progress.update(0, path.stem)
                result = run(model, variant, seed, args.data, args.steps)
                print(f"{path.stem}: {result['eval_loss']:.4f} in {result['train_seconds']:.0f} s", flush=True)
                stdlib_text.replace_file(path, json.dumps(result) + "\n")
                progress.update()
    page = args.results.parent / "methods.md"
    stdlib_text.replace_file(page, report(args.results))
    print(page)


if __name__ == "__main__":
    main()
