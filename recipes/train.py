"""Train a causal or masked language model of Transformers 2:4 sparse, from scratch or from pretrained weights.

    python recipes/train.py --model_name_or_path gpt2 --dataset my_texts/ --block_size 512 --max_steps 1000
    python recipes/train.py recipes/quickstart.yaml --max_steps 10       # a YAML file of flags; the command line wins
    accelerate launch recipes/train.py recipes/quickstart.yaml           # on several devices

`--method dense` is the control run: the same model, data and steps in a plain Trainer.
"""

from dataclasses import dataclass, field

import torch
from arguments import SparseArguments, TeacherArguments, UsageError, check_choice, check_toy_data, parse_arguments
from models import ModelArguments, make_model
from running import checkpoint_to_resume, evaluate_text, leave, run, sparse_or_dense_trainer, train_and_save
from text_data import DataArguments, make_datasets
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class ObjectiveArguments:
    objective: str = field(default="causal", metadata={"help": "causal or masked."})

    def __post_init__(self):
        check_choice("objective", self.objective, ("causal", "masked"))


ARGUMENTS = (
    ModelArguments,
    ObjectiveArguments,
    DataArguments,
    SparseArguments,
    TeacherArguments,
    TrainingArguments,
)


def make_trainer(
    model_args: ModelArguments,
    objective_args: ObjectiveArguments,
    data_args: DataArguments,
    sparse_args: SparseArguments,
    teacher_args: TeacherArguments,
    training_args: TrainingArguments,
) -> Trainer:
    """A Sparse24Trainer, or a plain Trainer for `method="dense"`, with its model and data."""
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name or model_args.model_name_or_path)
    masked = objective_args.objective == "masked"
    if masked and tokenizer.mask_token is None:
        raise UsageError("the tokenizer has no mask_token, which objective='masked' needs; take one of a masked model")
    auto_class = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    config = sparse_args.make_config()
    model = make_model(model_args, auto_class, tokenizer, data_args.block_size, training_args, config)
    with training_args.main_process_first(desc="tokenizing"):
        train, validation = make_datasets(data_args, tokenizer, training_args.seed)
    if masked:
        collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=data_args.mlm_probability)
    else:
        collator = collate_causal
    return sparse_or_dense_trainer(
        sparse_args,
        teacher=teacher_args.teacher,
        distillation=teacher_args.make_distillation(),
        model=model,
        args=training_args,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        data_collator=collator,
    )


def collate_causal(examples: list[dict]) -> dict[str, torch.Tensor]:
    """A batch of blocks. Labels are the inputs; the model shifts them."""
    input_ids = torch.tensor([example["input_ids"] for example in examples])
    return {"input_ids": input_ids, "labels": input_ids.clone()}


def main(argv: list[str] | None = None) -> Trainer:
    """Train, evaluate and save, as the arguments say; returns the trainer."""
    arguments = parse_arguments(ARGUMENTS, argv)
    check_toy_data(arguments)
    resume = checkpoint_to_resume(arguments[-1])  # before anything is loaded
    trainer = make_trainer(*arguments)
    train_and_save(trainer, resume)
    evaluate_text(trainer)
    return trainer


if __name__ == "__main__":
    leave(run(main))
