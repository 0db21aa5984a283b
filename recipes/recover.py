"""Does a dense teacher help a pruned model to recover? One dense model, pruned by `oneshot`, trained on in some ways.

    python recipes/recover.py                        # a small Llama on the standard library's source, three seeds
    python recipes/recover.py --steps 20 --seeds 0   # shorter, to try it out

Prints validation losses in nats per token: of the dense model, of the pruned one, and of each way, mean over seeds with
the lowest and the highest.
"""

import argparse
import json
import statistics
from pathlib import Path

import stdlib_text
import torch
import train
from methods import MODELS
from transformers import AutoModelForCausalLM, Trainer

from hf_sparse24 import Sparse24Config, oneshot

RECIPES = Path(__file__).resolve().parent
CALIBRATION = 64  # blocks
WAYS = {
    "labels alone": None,
    "2/3 KL at T = 2 (AST, the default)": {},
    "1/3 KL at T = 1 (CAST)": {"weight": 1 / 3, "temperature": 1},
    "AST and 0.1 SquareHead": {"hidden_weight": 0.1},
}


def run(data: Path, output: Path, **flags: object) -> tuple[Trainer, float]:
    """Train as `methods.yaml` says, with `flags` on top; the trainer and its validation loss."""
    flags = {
        "dataset": f"{data}/train.jsonl",
        "validation_file": f"{data}/validation.jsonl",
        "tokenizer_name": f"{data}/tokenizer",
        "output_dir": output,
        **flags,
    }
    trainer = train.main([f"{RECIPES}/methods.yaml", *(f"--{name}={value}" for name, value in flags.items())])
    return trainer, next(log["eval_loss"] for log in reversed(trainer.state.log_history) if "eval_loss" in log)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense_steps", type=int, default=1000, help="of pre-training; default: %(default)s")
    parser.add_argument("--steps", type=int, default=200, help="of recovery; default: %(default)s")
    parser.add_argument("--learning_rate", type=float, default=2e-3, help="of recovery; default: %(default)s")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--output", type=Path, default=Path("runs/recover"), help="default: %(default)s")
    parser.add_argument("--data", default="runs/stdlib_text", help="directory of the text and its tokenizer")
    args = parser.parse_args(argv)
    data = stdlib_text.prepare(args.data)
    sizes = {"model_type": "llama", "config_overrides": json.dumps(MODELS["llama"])}
    dense, loss = run(data, args.output / "dense", method="dense", max_steps=args.dense_steps, **sizes)
    rows = [("dense", [loss])]

    model = AutoModelForCausalLM.from_pretrained(args.output / "dense").eval()
    blocks = torch.tensor(dense.train_dataset[:CALIBRATION]["input_ids"])
    print(oneshot(model, list(blocks.split(8)), Sparse24Config(method="fixed-mask", target_modules="all-linear")))
    model.save_pretrained(args.output / "pruned")
    dense.model = dense.model_wrapped = model
    rows.append(("pruned by oneshot", [dense.evaluate()["eval_loss"]]))

    for way, settings in WAYS.items():
        teacher = {"teacher": args.output / "dense", "distillation": json.dumps(settings)}
        losses = [
            run(
                data,
                args.output / "recovered",
                model_name_or_path=args.output / "pruned",
                method="fixed-mask",
                target_modules="all-linear",
                max_steps=args.steps,
                warmup_steps=args.steps // 10,
                learning_rate=args.learning_rate,
                seed=seed,
                **({} if settings is None else teacher),
            )[1]
            for seed in args.seeds
        ]
        rows.append((way, losses))
    print("\n| model | validation loss |\n|---|---|")
    for name, losses in rows:
        spread = f" [{min(losses):.4f}, {max(losses):.4f}]" if len(losses) > 1 else ""
        print(f"| {name} | {statistics.mean(losses):.4f}{spread} |")


if __name__ == "__main__":
    main()
