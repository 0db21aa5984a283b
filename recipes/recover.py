"""Does a dense teacher help a pruned model to recover? A dense model, pruned and trained by `oneshot.py` in some ways.

    python recipes/recover.py                        # a small Llama on the standard library's source, three seeds
    python recipes/recover.py --steps 20 --seeds 0   # shorter, to try it out

Prints validation losses in nats per token: of the dense model, of the pruned one, and of each way, mean over seeds with
the lowest and the highest.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import oneshot
import stdlib_text
import train

from hf_sparse24.progress import Progress

RECIPES = Path(__file__).resolve().parent
CALIBRATION = 64  # blocks
LLAMA = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.08,
}
WAYS = {
    "dense, trained as long": {"method": "dense"},
    "labels alone": {},
    "2/3 KL at T = 2 (AST, the default)": {"distillation": {}},
    "1/3 KL at T = 1 (CAST)": {"distillation": {"weight": 1 / 3, "temperature": 1}},
    "AST and 0.1 SquareHead": {"distillation": {"hidden_weight": 0.1}},
}
"""Flags of `oneshot.py`; a way that says how to distil has the dense model as its teacher."""


def run(main: Callable, data: Path, output: Path, **flags: object) -> list[float]:
    """Call `main` of a recipe with the flags of `recover.yaml` and `flags`; returns its validation losses."""
    flags = {
        "dataset": f"{data}/train.jsonl",
        "validation_file": f"{data}/validation.jsonl",
        "tokenizer_name": f"{data}/tokenizer",
        "output_dir": output,
        **flags,
    }
    values = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in flags.items()}
    trainer = main([f"{RECIPES}/recover.yaml", *(f"--{name}={value}" for name, value in values.items())])
    return [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense_steps", type=int, default=1000, help="of pre-training; default: %(default)s")
    parser.add_argument("--steps", type=int, default=200, help="of recovery; default: %(default)s")
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="of recovery; default: %(default)s")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--output", type=Path, default=Path("runs/recover"), help="default: %(default)s")
    parser.add_argument("--data", default="runs/stdlib_text", help="directory of the text and its tokenizer")
    args = parser.parse_args(argv)
    data, dense = stdlib_text.prepare(args.data), args.output / "dense"
    sizes = {"model_type": "llama", "config_overrides": LLAMA}
    progress = Progress("training runs", 1 + len(WAYS) * len(args.seeds), "run", print)
    losses = {
        "dense": [run(train.main, data, dense, method="dense", max_steps=args.dense_steps, **sizes)[-1]],
        "pruned by oneshot": [],
    }
    progress.update()
    for way, flags in WAYS.items():
        losses[way] = []
        for seed in args.seeds:
            start, *_, end = run(
                oneshot.main,
                data,
                args.output / "recovered",
                model_name_or_path=dense,
                target_modules="all-linear",
                calibration_blocks=CALIBRATION,
                max_steps=args.steps,
                warmup_steps=args.steps // 10,
                learning_rate=args.learning_rate,
                seed=seed,
                eval_on_start=True,
                **flags,
                **({"teacher": dense} if "distillation" in flags else {}),
            )
            losses[way].append(end)
            progress.update(note=way)
            if way == "labels alone":
                losses["pruned by oneshot"].append(start)
    progress.close()
    print("\n| model | validation loss |\n|---|---|")
    for name, values in losses.items():
        spread = f" [{min(values):.4f}, {max(values):.4f}]" if len(values) > 1 else ""
        print(f"| {name} | {statistics.mean(values):.4f}{spread} |")


if __name__ == "__main__":
    main()
