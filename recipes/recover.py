"""Make a dense model 2:4 with some text: prune it, train it with the dense model as teacher, export it.

    python recipes/recover.py --model HuggingFaceTB/SmolLM2-135M --text my_texts/ --output my-2-4-model
    python recipes/recover.py --model DIR --text FILE --tokens 0        # pruned alone, no training

Three steps: `oneshot` prunes all linear layers and reconstructs them block by block, on the first part of the text and
on three times as much that the dense model writes from nothing, which keeps what it knows beyond the text given; then
the kept weights train on the rest, with the dense model as teacher; then the model is exported with its tokenizer,
with a card that has the losses of the dense model, of the pruned one and of the result. The last twentieth of the text
is held out for these. Put text of every kind that the model is for into it, chats too.

The defaults were measured on SmolLM2-135M (docs/measured/pretrained.md). A model of 8B parameters needs a GPU with
some 80 GB; there, take more of everything: `--calibration_tokens 262144 --own_tokens 786432 --tokens 100000000`, at
`--learning_rate 2e-5`.
"""

import argparse
import math
from pathlib import Path

import torch
from arguments import UsageError
from datasets import Dataset
from running import run
from text_data import DataArguments, make_datasets
from train import collate_causal
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainingArguments, set_seed

import hf_sparse24_command
from hf_sparse24 import Sparse24Config, Sparse24Trainer, export_model, make_model_card, oneshot, own_text
from hf_sparse24.methods import ONESHOT_METHOD

HELD_OUT = 128
"""Blocks to measure losses on, at most."""


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Prune, train and export as the arguments say; returns the held-out losses in nats per token."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a dense causal language model: a directory, or its name")
    parser.add_argument("--text", required=True, help="text, .jsonl or .parquet files, or a dataset of the Hub")
    parser.add_argument("--output", default="runs/recover", help="directory of the export; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=300_000, help="to train on; default: %(default)s")
    parser.add_argument("--calibration_tokens", type=int, default=24_576, help="to prune by; default: %(default)s")
    parser.add_argument(
        "--own_tokens", type=int, default=73_728, help="that it writes in addition; default: %(default)s"
    )
    parser.add_argument("--block_size", type=int, default=256, help="tokens of a sequence; default: %(default)s")
    parser.add_argument("--learning_rate", type=float, default=2e-4, help="default: %(default)s")
    parser.add_argument("--batch_size", type=int, default=2, help="sequences of a training step; default: %(default)s")
    parser.add_argument("--format", default="dense", choices=["dense", "packed"], help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    args = parser.parse_args(argv)
    for name, least in (("tokens", 0), ("own_tokens", 0), ("batch_size", 1)):
        if getattr(args, name) < least:
            raise UsageError(f"{name}={getattr(args, name)}: must be at least {least}")
    set_seed(args.seed)
    data = DataArguments(dataset=args.text, validation_split="0.05", block_size=args.block_size)
    arguments = TrainingArguments(
        f"{args.output}-training",
        max_steps=max(1, args.tokens // (args.block_size * args.batch_size)),
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),  # where Trainer asks to be told
        dataloader_pin_memory=torch.cuda.is_available(),
        seed=args.seed,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    blocks, held_out = make_datasets(data, tokenizer, args.seed)
    count, own = args.calibration_tokens // args.block_size, args.own_tokens // args.block_size
    needed = count + args.tokens // args.block_size
    if not 0 < count < len(blocks):
        raise UsageError(
            f"calibration_tokens={args.calibration_tokens}: must be at least block_size={args.block_size}, and less "
            f"than the {len(blocks) * args.block_size:,} tokens of the text that are not held out"
        )
    if needed > len(blocks):
        print(f"the text has {len(blocks) * args.block_size:,} tokens for pruning and training: some are used again")
    # A teacher's fp32 weights would be cast at every step.
    dense = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(arguments.device).eval()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(arguments.device)
    config = Sparse24Config(method=ONESHOT_METHOD, target_modules="all-linear")
    losses = {"dense": text_loss(dense, held_out)}
    with autocast(arguments.device):
        calibration = torch.tensor(blocks.select(range(count))["input_ids"])
        if own:
            written = own_text(dense, tokenizer, own, args.block_size, args.seed)
            calibration = torch.cat([calibration, written])
        print(oneshot(model, calibration.split(1), config))
    losses["pruned"] = text_loss(model, held_out)
    print(f"held-out loss: dense {losses['dense']:.4f}, pruned {losses['pruned']:.4f}", flush=True)
    if args.tokens:
        rest = blocks.select(range(count, len(blocks)))
        Sparse24Trainer(
            model,
            arguments,
            train_dataset=rest,
            data_collator=collate_causal,
            processing_class=tokenizer,
            teacher=dense,
        ).train()
        losses["trained"] = text_loss(model, held_out)
    export_model(model, args.output, args.format)
    tokenizer.save_pretrained(args.output)
    last = list(losses)[-1]
    card = make_model_card(
        model,
        format=args.format,
        model_id=Path(args.output).name,
        results={
            "eval_loss": losses[last],
            "perplexity": math.exp(losses[last]),
            "eval_loss_before_training": losses["pruned"],
        },
        dense_control={"eval_loss": losses["dense"], "perplexity": math.exp(losses["dense"])},
        hyperparameters={
            name: getattr(args, name)
            for name in ("tokens", "calibration_tokens", "own_tokens", "learning_rate", "seed")
        },
    )
    card.save(Path(args.output) / "README.md")
    if hf_sparse24_command.main(["verify", args.output]):
        raise SystemExit(f"{args.output}: is not what it should be, see above")
    print("\n| model | held-out loss | perplexity |\n|---|---|---|")
    for name, loss in losses.items():
        print(f"| {name} | {loss:.4f} | {math.exp(loss):.2f} |")
    return losses


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16)


@torch.no_grad()
def text_loss(model: PreTrainedModel, blocks: Dataset) -> float:
    """Nats per token on the first `HELD_OUT` blocks."""
    rows = torch.tensor(blocks.select(range(min(HELD_OUT, len(blocks))))["input_ids"], device=model.device)
    training = model.training
    model.eval()
    with autocast(model.device):
        losses = [model(input_ids=row[None], labels=row[None]).loss.item() for row in rows]
    model.train(training)
    return sum(losses) / len(losses)


if __name__ == "__main__":
    run(main)
