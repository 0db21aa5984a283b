"""Supervised fine-tuning (SFT) of a 2:4 sparse model on chats or instructions, through TRL; all weights, or LoRA.

    python recipes/sft.py recipes/finetune/sft.yaml --dataset my_chats/ \\
        --train_split train --validation_split validation
    python recipes/sft.py recipes/finetune/sft.yaml recipes/finetune/sft-toy.yaml      # a minute, on local data

`--lora true` trains an adapter and exports the merged model, as `lora.py` does. `--method dense` is the control run.
"""

from dataclasses import dataclass, field

from arguments import SparseArguments, UsageError, check_toy_data, parse_arguments
from lora import LoraArguments, merge_and_export, patch_sparse_base
from models import ModelArguments, make_model
from optional import require
from running import check_dense, checkpoint_to_resume, evaluate_text, leave, run, train_and_save
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, set_seed

from hf_sparse24 import Sparse24Callback, patch_model

datasets = require("datasets", "recipes")
trl = require("trl", "trl")

COLUMNS = (("messages",), ("prompt", "completion"), ("text",))
"""Of the kinds of data sets that TRL knows for SFT."""


@dataclass
class ChatArguments:
    dataset: str | None = field(
        default=None, metadata={"help": "A directory with train.jsonl, or a dataset of the Hub; columns as TRL's."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub dataset."})
    train_split: str = field(default="train", metadata={"help": "Split to train on."})
    validation_split: str | None = field(default=None, metadata={"help": "Split to evaluate on."})
    max_samples: int | None = field(default=None, metadata={"help": "Read this many examples of each split at most."})
    lora: bool = field(default=False, metadata={"help": "Train an adapter instead of all weights."})

    def __post_init__(self):
        if self.dataset is None:
            raise UsageError("dataset is missing: a directory with train.jsonl, or a dataset of the Hub")


ARGUMENTS = (ModelArguments, ChatArguments, SparseArguments, LoraArguments, trl.SFTConfig)


def make_dataset(args: ChatArguments, split: str) -> "datasets.Dataset":
    """The columns of one split that TRL trains on."""
    try:
        rows = datasets.load_dataset(args.dataset, args.dataset_config, split=split)
    except ValueError as error:  # no such split
        raise UsageError(f"dataset={args.dataset!r}: {error}") from error
    if args.max_samples is not None:
        rows = rows.take(args.max_samples)
    for columns in COLUMNS:
        if {*columns} <= {*rows.column_names}:
            return rows.select_columns([*columns])
    known = ", or ".join(" and ".join(columns) for columns in COLUMNS)
    raise UsageError(f"dataset={args.dataset!r}: has the columns {sorted(rows.column_names)}; SFT needs {known}")


def make_trainer(
    model_args: ModelArguments,
    chat_args: ChatArguments,
    sparse_args: SparseArguments,
    lora_args: LoraArguments,
    training_args: "trl.SFTConfig",
) -> Trainer:
    """TRL's trainer, with the callback that runs the sparsity."""
    peft_config = lora_args.make_config() if chat_args.lora else None  # before anything is loaded
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name or model_args.model_name_or_path)
    model = make_model(model_args, AutoModelForCausalLM, tokenizer, training_args.max_length or 1, training_args)
    with training_args.main_process_first(desc="reading the data"):
        train = make_dataset(chat_args, chat_args.train_split)
        validation = chat_args.validation_split and make_dataset(chat_args, chat_args.validation_split)
    if "messages" in train.column_names and not (tokenizer.chat_template or training_args.chat_template_path):
        raise UsageError("the tokenizer has no chat template, which messages need; give --chat_template_path")
    if sparse_args.method == "dense":
        check_dense(model)
    elif chat_args.lora:
        patch_sparse_base(model, sparse_args.make_config())
    else:
        report = patch_model(model, sparse_args.make_config())
        if training_args.process_index == 0:
            print(report)
    trainer = trl.SFTTrainer(
        model,
        training_args,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    if sparse_args.method != "dense":
        Sparse24Callback.add_to(trainer)
    return trainer


def main(argv: list[str] | None = None) -> Trainer:
    """Train, evaluate and save, as the arguments say; returns the trainer."""
    arguments = parse_arguments(ARGUMENTS, argv)
    check_toy_data(arguments)
    _, chat_args, _, lora_args, training_args = arguments
    resume = checkpoint_to_resume(training_args)  # before anything is loaded
    trainer = make_trainer(*arguments)
    train_and_save(trainer, resume)
    evaluate_text(trainer)
    if chat_args.lora:
        merge_and_export(trainer, lora_args.export_format)
    return trainer


if __name__ == "__main__":
    leave(run(main))
