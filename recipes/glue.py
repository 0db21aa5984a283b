"""Fine-tune a model on a GLUE task 2:4 sparse, or a data set of the same columns, and evaluate it.

    python recipes/glue.py recipes/finetune/glue.yaml --model_name_or_path bert-base-uncased --task mrpc
    python recipes/glue.py recipes/finetune/glue.yaml recipes/finetune/glue-toy.yaml      # a minute, on local data

`--method dense` is the control run. A 2:4 checkpoint goes on by its method, which `--method` must name; one
whose dense tail has ended trains on dense.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from arguments import SparseArguments, UsageError, check_choice, check_splits, check_toy_data, parse_arguments
from models import ModelArguments, make_model
from optional import require
from running import checkpoint_to_resume, evaluate_splits, leave, run, sparse_or_dense_trainer, train_and_save
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    Trainer,
    TrainingArguments,
    set_seed,
)

datasets = require("datasets", "recipes")
evaluate = require("evaluate", "recipes")

METRIC = Path(__file__).resolve().parent / "metrics" / "glue.py"


class Task(NamedTuple):
    columns: tuple[str, ...]  # of the text, or of the two texts
    labels: int  # 1 is regression


TASKS = {
    "cola": Task(("sentence",), 2),
    "sst2": Task(("sentence",), 2),
    "mrpc": Task(("sentence1", "sentence2"), 2),
    "stsb": Task(("sentence1", "sentence2"), 1),
    "qqp": Task(("question1", "question2"), 2),
    "mnli": Task(("premise", "hypothesis"), 3),
    "qnli": Task(("question", "sentence"), 2),
    "rte": Task(("sentence1", "sentence2"), 2),
    "wnli": Task(("sentence1", "sentence2"), 2),
}


@dataclass
class GlueArguments:
    dataset: str = field(default="nyu-mll/glue", metadata={"help": "A name on the Hub, or a directory."})
    task: str = field(default="sst2", metadata={"help": ", ".join(TASKS)})
    max_length: int = field(default=128, metadata={"help": "Tokens of an example, of both texts together."})
    max_samples: int | None = field(default=None, metadata={"help": "Read this many examples of each split at most."})

    def __post_init__(self):
        check_choice("task", self.task, TASKS)


ARGUMENTS = (ModelArguments, GlueArguments, SparseArguments, TrainingArguments)


def make_datasets(args: GlueArguments, tokenizer) -> datasets.DatasetDict:
    """The task's splits with labels, tokenized."""
    splits = datasets.load_dataset(args.dataset, args.task)
    splits = datasets.DatasetDict({name: rows for name, rows in splits.items() if not name.startswith("test")})
    columns = TASKS[args.task].columns
    check_splits(args.dataset, splits, "train")
    missing = sorted({*columns, "label"} - {*splits["train"].column_names})
    if missing:
        raise UsageError(f"task={args.task!r}: {args.dataset} lacks the columns {missing}")
    if not any(name.startswith("validation") for name in splits):
        raise UsageError(f"{args.dataset} has the splits {[*splits]}, and none to validate on")
    if args.max_samples is not None:
        splits = datasets.DatasetDict({name: rows.take(args.max_samples) for name, rows in splits.items()})

    others = [name for name in splits["train"].column_names if name != "label"]

    def tokenize(batch):
        return tokenizer(*(batch[column] for column in columns), truncation=True, max_length=args.max_length)

    return splits.map(tokenize, batched=True, remove_columns=others, desc="Tokenizing")


def make_metrics(task: str):
    """What a Trainer calls with its predictions: the task's metrics, and `metric`, their mean."""
    metric = evaluate.load(str(METRIC), task, keep_in_memory=True, experiment_id=str(os.getpid()))

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        scores = prediction.predictions
        predicted = scores[:, 0] if TASKS[task].labels == 1 else scores.argmax(axis=1)
        results = metric.compute(predictions=predicted, references=prediction.label_ids)
        return {**results, "metric": sum(results.values()) / len(results)}

    return compute


def make_trainer(
    model_args: ModelArguments, glue_args: GlueArguments, sparse_args: SparseArguments, training_args: TrainingArguments
) -> tuple[Trainer, dict[str, datasets.Dataset]]:
    """The trainer, and every split with labels to evaluate on."""
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name or model_args.model_name_or_path)
    if tokenizer.pad_token is None:  # as GPT-2's
        tokenizer.pad_token = tokenizer.eos_token
    model = make_model(
        model_args,
        AutoModelForSequenceClassification,
        tokenizer,
        glue_args.max_length,
        training_args,
        sparse_args.make_config(),
        num_labels=TASKS[glue_args.task].labels,
        pad_token_id=tokenizer.pad_token_id,
    )
    with training_args.main_process_first(desc="tokenizing"):
        splits = make_datasets(glue_args, tokenizer)
    held_out = {name: rows for name, rows in splits.items() if name.startswith("validation")}
    trainer = sparse_or_dense_trainer(
        sparse_args,
        model=model,
        args=training_args,
        train_dataset=splits["train"],
        eval_dataset=next(iter(held_out.values())),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=make_metrics(glue_args.task),
    )
    return trainer, held_out


def main(argv: list[str] | None = None) -> Trainer:
    """Train, evaluate on every validation split and save, as the arguments say; returns the trainer."""
    arguments = parse_arguments(ARGUMENTS, argv)
    check_toy_data(arguments)
    resume = checkpoint_to_resume(arguments[-1])  # before anything is loaded
    trainer, held_out = make_trainer(*arguments)
    train_and_save(trainer, resume)
    evaluate_splits(trainer, held_out)
    return trainer


if __name__ == "__main__":
    leave(run(main))
