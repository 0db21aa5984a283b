"""Prune a pretrained model to 2:4 in one pass over calibration data, then let it recover, with a teacher if asked.

    python recipes/oneshot.py recipes/finetune/oneshot.yaml --model_name_or_path gpt2 --teacher gpt2
    python recipes/oneshot.py recipes/finetune/oneshot.yaml recipes/finetune/oneshot-toy.yaml  # a minute, on local data

Prints what pruning did to each layer; with `--eval_on_start true`, the first validation loss is that of the pruned
model before it trains. `--method dense` is the control run: nothing is pruned, and the dense model trains as much.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

import torch
from arguments import SparseArguments, TeacherArguments, UsageError, check_choice, check_toy_data, parse_arguments
from models import ModelArguments, make_model
from running import checkpoint_to_resume, evaluate_text, leave, run, sparse_or_dense_trainer, train_and_save
from text_data import DataArguments, make_datasets
from train import collate_causal
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer, TrainingArguments, set_seed

from hf_sparse24 import oneshot
from hf_sparse24.pruning.options import CRITERIA, RECONSTRUCTIONS
from hf_sparse24.pruning.report import OneshotReport


@dataclass
class OneshotArguments(SparseArguments):
    method: str = field(
        default="fixed-mask", metadata={"help": "One that keeps masks; or dense, the control run, which is not pruned."}
    )
    target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"], metadata={"help": "What to prune, as in train.py."}
    )
    criterion: str = field(default="sparsegpt", metadata={"help": ", ".join(CRITERIA)})
    reconstruct: str = field(
        default="block",
        metadata={"help": "What makes up for dropped weights: block trains each block, layer solves each layer, none."},
    )
    calibration_blocks: int = field(default=128, metadata={"help": "Training blocks to choose masks by."})

    def __post_init__(self):
        super().__post_init__()
        check_choice("criterion", self.criterion, list(CRITERIA))
        check_choice("reconstruct", self.reconstruct, [way or "none" for way in RECONSTRUCTIONS])
        if self.calibration_blocks < 1:
            raise UsageError(f"calibration_blocks={self.calibration_blocks}: must be at least 1")


BATCH_TOKENS = 256
"""Of a calibration batch, at least; each is a step of block reconstruction."""
ARGUMENTS = (ModelArguments, DataArguments, OneshotArguments, TeacherArguments, TrainingArguments)


def prune(model: PreTrainedModel, blocks: Iterable[dict], args: OneshotArguments, bf16: bool) -> OneshotReport:
    """Prune in place, by the first of `blocks`, a dataset of `input_ids`."""
    rows = torch.tensor([block["input_ids"] for block in islice(blocks, args.calibration_blocks)])
    batches = rows.split(max(1, BATCH_TOKENS // rows.shape[1]))
    reconstruct = None if args.reconstruct == "none" else args.reconstruct
    with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
        return oneshot(model, batches, args.make_config(), criterion=args.criterion, reconstruct=reconstruct)


def main(argv: list[str] | None = None) -> Trainer:
    """Prune, evaluate, train and save, as the arguments say; returns the trainer."""
    arguments = parse_arguments(ARGUMENTS, argv)
    check_toy_data(arguments)
    model_args, data_args, oneshot_args, teacher_args, training_args = arguments
    resume = checkpoint_to_resume(training_args)  # before anything is loaded
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name or model_args.model_name_or_path)
    model = make_model(model_args, AutoModelForCausalLM, tokenizer, data_args.block_size, training_args)
    with training_args.main_process_first(desc="tokenizing"):
        train, validation = make_datasets(data_args, tokenizer, training_args.seed)
    if oneshot_args.method != "dense":
        model.to(training_args.device)  # every process prunes its own copy, by the same blocks
        report = prune(model, train, oneshot_args, training_args.bf16)
        if training_args.process_index == 0:
            print(report)
    trainer = sparse_or_dense_trainer(
        oneshot_args,
        teacher=teacher_args.teacher,
        distillation=teacher_args.make_distillation(),
        model=model,
        args=training_args,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        data_collator=collate_causal,
    )
    train_and_save(trainer, resume)
    evaluate_text(trainer)
    return trainer


if __name__ == "__main__":
    leave(run(main))
