"""Adapt a 2:4 sparse model to a text with LoRA, merge the adapter, check that the result is 2:4, and export it.

    python recipes/lora.py recipes/finetune/lora.yaml --dataset my_texts/
    python recipes/lora.py recipes/finetune/lora.yaml recipes/finetune/lora-toy.yaml      # a minute, on local data

The base is a 2:4 checkpoint, or an ordinary one whose weights have 2:4 zeros; `hf-sparse24 prune` makes one of a dense
model. The adapter is in `output_dir`, the merged model in `output_dir/merged`. `--method dense` is the control run:
LoRA on a dense model.
"""

from dataclasses import dataclass, field
from pathlib import Path

from arguments import SparseArguments, UsageError, check_choice, check_toy_data, parse_arguments
from models import ModelArguments, make_model
from optional import require
from running import checkpoint_to_resume, evaluate_text, leave, run, sparse_or_dense_trainer, train_and_save
from text_data import DataArguments, make_datasets
from train import collate_causal
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

import hf_sparse24_command
from hf_sparse24 import Sparse24Config, export_model, is_nm_sparse, patch_model, sparse_weights
from hf_sparse24.run import patched_config


@dataclass
class LoraArguments:
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapters."})
    lora_alpha: int = field(default=32, metadata={"help": "Adapters are multiplied by lora_alpha / lora_r."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Of the adapters' inputs, in [0, 1)."})
    lora_modules: list[str] = field(
        default_factory=lambda: ["all-linear"], metadata={"help": "all-linear, or the ends of layers' names."}
    )
    export_format: str = field(default="dense", metadata={"help": "Of the merged model: dense or packed."})

    def __post_init__(self):
        if self.lora_r < 1:
            raise UsageError(f"lora_r={self.lora_r}: must be at least 1")
        if not 0 <= self.lora_dropout < 1:
            raise UsageError(f"lora_dropout={self.lora_dropout}: must be in [0, 1)")
        check_choice("export_format", self.export_format, ("dense", "packed"))

    def make_config(self):
        """PEFT's own config.

        Raises:
            ImportError: PEFT is not installed.
        """
        modules = self.lora_modules
        return require("peft", "peft").LoraConfig(
            task_type="CAUSAL_LM",
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules="all-linear" if modules == ["all-linear"] else modules,
        )


ARGUMENTS = (ModelArguments, DataArguments, SparseArguments, LoraArguments, TrainingArguments)


def patch_sparse_base(model: PreTrainedModel, config: Sparse24Config) -> None:
    """Patch a model whose weights are 2:4 already: it stays frozen, so nothing would make up for pruning it here.

    Raises:
        UsageError: its weights are dense, or it is patched with another config.
    """
    is_patched = patched_config(model) is not None
    patch_model(model, config)
    if is_patched:
        return
    weights = sparse_weights(model)
    dense = [name for name, w in weights.items() if not is_nm_sparse(w.parameter, *w.pattern, w.input_dim)]
    if dense:
        raise UsageError(
            f"{len(dense)} of {len(weights)} weights that target_modules names are dense, such as {dense[0]}, and an "
            f"adapter does not make up for pruning them; take a model that is {config.pattern} sparse "
            f"(hf-sparse24 prune makes one), or name its sparse layers"
        )


def merge_and_export(trainer: Trainer, format: str) -> None:
    """Merge the adapter, write the model and its tokenizer to `output_dir/merged`, and check it there.

    Raises:
        SystemExit: a sparse weight of the merged model is not 2:4.
    """
    directory = Path(str(trainer.args.output_dir)) / "merged"
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        merged = trainer.accelerator.unwrap_model(trainer.model).merge_and_unload()
        trainer.processing_class.save_pretrained(directory)
        if patched_config(merged) is None:
            merged.save_pretrained(directory)
        else:
            export_model(merged, directory, format)
            if hf_sparse24_command.main(["verify", str(directory)]):
                raise SystemExit(f"{directory}: the merged model is not what it should be, see above")


def make_trainer(
    model_args: ModelArguments,
    data_args: DataArguments,
    sparse_args: SparseArguments,
    lora_args: LoraArguments,
    training_args: TrainingArguments,
) -> Trainer:
    """A Sparse24Trainer of adapters around a 2:4 model, or a plain Trainer for `method="dense"`, with its data."""
    peft = require("peft", "peft")  # before anything is loaded
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name or model_args.model_name_or_path)
    model = make_model(model_args, AutoModelForCausalLM, tokenizer, data_args.block_size, training_args)
    if sparse_args.method != "dense":
        patch_sparse_base(model, sparse_args.make_config())
    with training_args.main_process_first(desc="tokenizing"):
        train, validation = make_datasets(data_args, tokenizer, training_args.seed)
    return sparse_or_dense_trainer(
        sparse_args,
        model=peft.get_peft_model(model, lora_args.make_config()),
        args=training_args,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        data_collator=collate_causal,
    )


def main(argv: list[str] | None = None) -> Trainer:
    """Train, evaluate, save, merge and export, as the arguments say; returns the trainer, its model merged."""
    arguments = parse_arguments(ARGUMENTS, argv)
    check_toy_data(arguments)
    lora_args, training_args = arguments[-2:]
    resume = checkpoint_to_resume(training_args)  # before anything is loaded
    trainer = make_trainer(*arguments)
    train_and_save(trainer, resume)
    evaluate_text(trainer)
    merge_and_export(trainer, lora_args.export_format)
    return trainer


if __name__ == "__main__":
    leave(run(main))
