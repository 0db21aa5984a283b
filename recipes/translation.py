"""Train an encoder-decoder model of Transformers 2:4 sparse to translate, and evaluate it by BLEU (sacrebleu).

    accelerate launch recipes/translation.py recipes/pretrain/transformer-base.yaml                        # WMT14 En-De
    python recipes/translation.py recipes/pretrain/transformer-base.yaml recipes/pretrain/translation-toy.yaml
    python recipes/translation.py --model_name_or_path Helsinki-NLP/opus-mt-en-de --output_dir runs/marian  # fine-tunes

`--method dense` is the control run. A 2:4 checkpoint stays as it is saved: its method goes on.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from arguments import SparseArguments, UsageError, check_splits, check_toy_data, parse_arguments
from models import ModelArguments, make_model
from optional import require
from running import checkpoint_to_resume, evaluate_splits, leave, run, sparse_or_dense_trainer, train_and_save
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

from hf_sparse24 import Sparse24Seq2SeqTrainer

datasets = require("datasets", "recipes")
sacrebleu = require("sacrebleu", "recipes")

COLUMN = "translation"  # of the WMT data sets: a text by language


@dataclass
class TranslationArguments:
    dataset: str = field(default="wmt/wmt14", metadata={"help": "A name on the Hub, or a directory, as WMT's."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub dataset, as de-en."})
    source: str = field(default="en", metadata={"help": "Language to translate from."})
    target: str = field(default="de", metadata={"help": "Language to translate to."})
    prefix: str = field(default="", metadata={"help": "Put before each source, as T5's 'translate English to ...: '."})
    max_length: int = field(default=128, metadata={"help": "Tokens of a sentence. Longer ones are not trained on."})
    max_samples: int | None = field(default=None, metadata={"help": "Read this many pairs of each split at most."})
    num_proc: int | None = field(default=None, metadata={"help": "Processes that tokenize."})


ARGUMENTS = (ModelArguments, TranslationArguments, SparseArguments, Seq2SeqTrainingArguments)


def make_datasets(args: TranslationArguments, tokenizer) -> tuple[datasets.DatasetDict, dict[tuple[int, ...], str]]:
    """The tokenized splits, and the target texts of those that are evaluated, by their tokens."""
    splits = datasets.load_dataset(args.dataset, args.dataset_config)
    check_splits(args.dataset, splits, "train", "validation")
    pair = next(iter(splits["train"].take(1)), {}).get(COLUMN, {})
    if missing := sorted({args.source, args.target} - {*pair}):
        raise UsageError(f"{args.dataset} lacks {missing} in a column {COLUMN!r}; it has {splits['train'].features}")
    if args.max_samples is not None:
        splits = datasets.DatasetDict({name: rows.take(args.max_samples) for name, rows in splits.items()})

    def tokenize(batch, truncation):
        sources = [args.prefix + pair[args.source] for pair in batch[COLUMN]]
        targets = [pair[args.target] for pair in batch[COLUMN]]
        return tokenizer(sources, text_target=targets, truncation=truncation, max_length=args.max_length)

    tokenized, references = datasets.DatasetDict(), {}
    for name, rows in splits.items():
        given = {"truncation": name != "train"}
        how = {"batched": True, "num_proc": args.num_proc, "remove_columns": rows.column_names}
        tokenized[name] = rows.map(tokenize, fn_kwargs=given, desc=f"Tokenizing {name}", **how)
        if name != "train":
            texts = (pair[args.target] for pair in rows[COLUMN])
            references |= {tuple(ids): text for ids, text in zip(tokenized[name]["labels"], texts)}
    tokenized["train"] = tokenized["train"].filter(
        lambda row: max(len(row["input_ids"]), len(row["labels"])) <= args.max_length, num_proc=args.num_proc
    )
    if not len(tokenized["train"]):
        raise UsageError(f"max_length={args.max_length}: every pair is longer")
    return tokenized, references


def make_metrics(
    tokenizer: PreTrainedTokenizerBase, references: dict[tuple[int, ...], str]
) -> Callable[[EvalPrediction], dict[str, float]]:
    """What a Trainer calls with generated tokens: sacrebleu's BLEU against the texts as they are in the data set.

    These are found by their tokens, since a Trainer that groups sentences by length evaluates in another order.
    """
    pad = tokenizer.pad_token_id

    def compute(prediction: EvalPrediction) -> dict[str, float]:
        tokens = np.where(prediction.predictions == -100, pad, prediction.predictions)
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        true = [references[tuple(ids[(ids != -100) & (ids != pad)].tolist())] for ids in prediction.label_ids]
        return {"bleu": sacrebleu.corpus_bleu(texts, [true]).score}

    return compute


def make_trainer(
    model_args: ModelArguments,
    translation_args: TranslationArguments,
    sparse_args: SparseArguments,
    training_args: Seq2SeqTrainingArguments,
) -> tuple[Seq2SeqTrainer, dict[str, datasets.Dataset]]:
    """The trainer, and every split to evaluate on."""
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name or model_args.model_name_or_path)
    if tokenizer.pad_token is None or tokenizer.eos_token is None:
        raise UsageError("the tokenizer lacks a pad_token or an eos_token; take one of an encoder-decoder model")
    fresh = {} if model_args.model_type is None else decoding_ids(tokenizer)
    config, length = sparse_args.make_config(), translation_args.max_length
    model = make_model(model_args, AutoModelForSeq2SeqLM, tokenizer, length, training_args, config, **fresh)
    with training_args.main_process_first(desc="tokenizing"):
        splits, references = make_datasets(translation_args, tokenizer)
    held_out = {name: rows for name, rows in splits.items() if name != "train"}
    training_args.predict_with_generate = True  # BLEU is of what a model writes without seeing the target
    if training_args.generation_max_length is None:
        training_args.generation_max_length = length
    trainer = sparse_or_dense_trainer(
        sparse_args,
        classes=(Sparse24Seq2SeqTrainer, Seq2SeqTrainer),
        model=model,
        args=training_args,
        train_dataset=splits["train"],
        eval_dataset=splits["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        compute_metrics=make_metrics(tokenizer, references),
    )
    return trainer, held_out


def decoding_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Config fields of a model from scratch: it begins with the pad token, as Marian and T5, and ends with eos."""
    return {"decoder_start_token_id": tokenizer.pad_token_id, "forced_eos_token_id": tokenizer.eos_token_id}


def main(argv: list[str] | None = None) -> Seq2SeqTrainer:
    """Train, evaluate on validation and test, and save, as the arguments say; returns the trainer."""
    arguments = parse_arguments(ARGUMENTS, argv)
    check_toy_data(arguments)
    resume = checkpoint_to_resume(arguments[-1])  # before anything is loaded
    trainer, held_out = make_trainer(*arguments)
    train_and_save(trainer, resume)
    evaluate_splits(trainer, held_out)
    return trainer


if __name__ == "__main__":
    leave(run(main))
