"""Fine-tune a model on SQuAD 2:4 sparse, or a data set of the same columns, and evaluate exact match and F1.

    python recipes/squad.py recipes/finetune/squad.yaml --model_name_or_path bert-base-uncased
    python recipes/squad.py recipes/finetune/squad.yaml recipes/finetune/squad-toy.yaml    # a minute or two, local data

`--method dense` is the control run. A 2:4 checkpoint goes on by its method, which `--method` must name; one
whose dense tail has ended trains on dense.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from arguments import SparseArguments, UsageError, check_splits, check_toy_data, parse_arguments
from models import ModelArguments, make_model
from optional import require
from running import checkpoint_to_resume, leave, run, save_metrics, sparse_or_dense_trainer, train_and_save
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    EvalPrediction,
    Trainer,
    TrainingArguments,
    set_seed,
)

datasets = require("datasets", "recipes")
evaluate = require("evaluate", "recipes")

METRIC = Path(__file__).resolve().parent / "metrics" / "squad.py"
OUTSIDE = (-1, -1)  # where a token is no part of the context


@dataclass
class SquadArguments:
    dataset: str = field(default="rajpurkar/squad", metadata={"help": "A name on the Hub, or a directory."})
    max_length: int = field(default=384, metadata={"help": "Tokens of a question and a part of its context."})
    stride: int = field(default=128, metadata={"help": "Tokens that two parts of a long context share."})
    max_answer_length: int = field(default=30, metadata={"help": "Tokens of an answer at most."})
    max_samples: int | None = field(default=None, metadata={"help": "Read this many examples of each split at most."})

    def __post_init__(self):
        if not 0 <= self.stride < self.max_length:
            raise UsageError(f"stride={self.stride}: must be from 0 up to below max_length={self.max_length}")


ARGUMENTS = (ModelArguments, SquadArguments, SparseArguments, TrainingArguments)


def make_parts(examples: datasets.Dataset, args: SquadArguments, tokenizer) -> datasets.Dataset:
    """Questions with parts of their contexts, `max_length` tokens each: where the answer is, and where tokens are.

    A part that does not hold the whole answer has both positions at its first token. `offsets` are those of a context's
    tokens in characters; `example` is the number of the row that a part is of.
    """

    def split(batch, rows):
        questions = [question.strip() for question in batch["question"]]
        longest = max(map(len, tokenizer(questions, add_special_tokens=False)["input_ids"]))
        if args.max_length <= longest + tokenizer.num_special_tokens_to_add(pair=True) + args.stride:
            raise UsageError(
                f"max_length={args.max_length}: a question of {longest} tokens and stride={args.stride} leave no "
                f"room for its context; give a larger max_length or a smaller stride"
            )
        parts = tokenizer(
            questions,
            batch["context"],
            truncation="only_second",
            max_length=args.max_length,
            stride=args.stride,
            padding="max_length",
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        columns = {name: parts[name] for name in tokenizer.model_input_names}
        columns |= {name: [] for name in ("start_positions", "end_positions", "offsets", "example")}
        for index, of in enumerate(parts["overflow_to_sample_mapping"]):
            kinds = parts.sequence_ids(index)
            offsets = [pair if kind == 1 else OUTSIDE for pair, kind in zip(parts["offset_mapping"][index], kinds)]
            answers = batch["answers"][of]
            start = answers["answer_start"][0]
            first, last = token_span(offsets, start, start + len(answers["text"][0]))
            columns["start_positions"].append(first)
            columns["end_positions"].append(last)
            columns["offsets"].append(offsets)
            columns["example"].append(rows[of])
        return columns

    return examples.map(
        split, with_indices=True, batched=True, remove_columns=examples.column_names, desc="Splitting contexts"
    )


def token_span(offsets: list[tuple[int, int]], start: int, end: int) -> tuple[int, int]:
    """The first and the last token of characters `start` to `end`; (0, 0) if the tokens do not hold all of them."""
    inside = [index for index, (left, right) in enumerate(offsets) if left < end and right > start]
    if not inside or offsets[inside[0]][0] > start or offsets[inside[-1]][1] < end:
        return 0, 0
    return inside[0], inside[-1]


def best_answers(examples, parts, starts: np.ndarray, ends: np.ndarray, max_answer_length: int) -> list[str]:
    """For each example the text, of any of its parts, whose start and end have the largest sum of logits."""
    length = starts.shape[1]
    allowed = np.tri(length, dtype=bool).T & np.tri(length, k=max_answer_length - 1, dtype=bool)  # [start, end]
    best = [(-np.inf, "")] * len(examples)
    contexts = examples["context"]
    for part, start, end in zip(parts, starts, ends):
        offsets = np.array(part["offsets"])
        inside = offsets[:, 1] > offsets[:, 0]
        scores = np.where(allowed & inside[:, None] & inside[None], start[:, None] + end[None], -np.inf)
        first, last = np.unravel_index(scores.argmax(), scores.shape)
        text = contexts[part["example"]][
            offsets[first, 0] : offsets[last, 1]
        ].strip()  # GPT-2's tokens begin with spaces
        best[part["example"]] = max(best[part["example"]], (scores[first, last], text), key=lambda found: found[0])
    return [text for _, text in best]


def make_trainer(
    model_args: ModelArguments,
    squad_args: SquadArguments,
    sparse_args: SparseArguments,
    training_args: TrainingArguments,
) -> Trainer:
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name or model_args.model_name_or_path)
    if tokenizer.pad_token is None:  # as GPT-2's
        tokenizer.pad_token = tokenizer.eos_token
    config, length = sparse_args.make_config(), squad_args.max_length
    model = make_model(model_args, AutoModelForQuestionAnswering, tokenizer, length, training_args, config)
    with training_args.main_process_first(desc="splitting contexts"):
        splits = datasets.load_dataset(squad_args.dataset)
        check_splits(squad_args.dataset, splits, "train", "validation")
        if squad_args.max_samples is not None:
            splits = {name: rows.take(squad_args.max_samples) for name, rows in splits.items()}
        train, held_out = (make_parts(splits[name], squad_args, tokenizer) for name in ("train", "validation"))
    examples = splits["validation"]
    metric = evaluate.load(str(METRIC), keep_in_memory=True, experiment_id=str(os.getpid()))

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        texts = best_answers(examples, held_out, *prediction.predictions, squad_args.max_answer_length)
        predicted = [{"id": name, "prediction_text": text} for name, text in zip(examples["id"], texts)]
        true = [{"id": name, "answers": answers} for name, answers in zip(examples["id"], examples["answers"])]
        return metric.compute(predictions=predicted, references=true)

    return sparse_or_dense_trainer(
        sparse_args,
        model=model,
        args=training_args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )


def main(argv: list[str] | None = None) -> Trainer:
    """Train, evaluate and save, as the arguments say; returns the trainer."""
    arguments = parse_arguments(ARGUMENTS, argv)
    check_toy_data(arguments)
    resume = checkpoint_to_resume(arguments[-1])  # before anything is loaded
    trainer = make_trainer(*arguments)
    train_and_save(trainer, resume)
    save_metrics(trainer, "eval", trainer.evaluate())
    return trainer


if __name__ == "__main__":
    leave(run(main))
