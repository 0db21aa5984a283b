"""Train a causal or masked language model of Transformers 2:4 sparse, from scratch or from pretrained weights.

    python recipes/train.py --model_name_or_path gpt2 --dataset my_texts/ --block_size 512 --max_steps 1000
    python recipes/train.py recipes/quickstart.yaml --max_steps 10       # a YAML file of flags; the command line wins
    accelerate launch recipes/train.py recipes/quickstart.yaml           # on several devices

`--method dense` is the control run: the same model, data and steps in a plain Trainer.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
import yaml
from text_data import DataArguments, make_datasets
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import SaveStrategy, get_last_checkpoint

from hf_sparse24 import METHODS, DistillationConfig, Sparse24Config, Sparse24Trainer


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "Pretrained weights to start from."})
    model_type: str | None = field(default=None, metadata={"help": "Architecture to train from scratch, as 'llama'."})
    config_overrides: dict | str | None = field(
        default=None, metadata={"help": "With model_type: JSON of config fields, as '{\"hidden_size\": 256}'."}
    )
    tokenizer_name: str | None = field(default=None, metadata={"help": "Default: model_name_or_path."})
    dtype: str = field(default="float32", metadata={"help": "Of the master weights: float32 or bfloat16."})
    objective: str = field(default="causal", metadata={"help": "causal or masked."})

    def __post_init__(self):
        if (self.model_name_or_path is None) == (self.model_type is None):
            given = "neither" if self.model_type is None else "both"
            raise ValueError(
                f"{given} of model_name_or_path (pretrained) and model_type (from scratch) given; give one"
            )
        self.config_overrides = _json_object("config_overrides", self.config_overrides)
        if self.config_overrides and self.model_type is None:
            raise ValueError("config_overrides is for model_type; a pretrained model keeps its own config")
        if self.model_type is not None and self.tokenizer_name is None:
            raise ValueError(f"model_type={self.model_type!r} needs tokenizer_name: a name on the Hub or a directory")
        _check_choice("dtype", self.dtype, ("float32", "bfloat16"))
        _check_choice("objective", self.objective, ("causal", "masked"))


@dataclass
class SparseArguments:
    method: str = field(default="s-ste", metadata={"help": f"{', '.join(sorted(METHODS))}; or dense, the control run."})
    target_modules: list[str] = field(
        default_factory=lambda: ["mlp"],
        metadata={"help": "mlp, attention, all-linear, a regular expression, or several name endings."},
    )
    sparse24: dict | str | None = field(default=None, metadata={"help": "JSON of further Sparse24Config fields."})
    teacher: str | None = field(
        default=None, metadata={"help": "A model to learn from as well, as the dense original of a pruned one."}
    )
    distillation: dict | str | None = field(
        default=None, metadata={"help": "With teacher: JSON of DistillationConfig, as '{\"temperature\": 1}'."}
    )

    def __post_init__(self):
        _check_choice("method", self.method, ("dense", *sorted(METHODS)))
        self.sparse24 = _json_object("sparse24", self.sparse24)
        self.distillation = _json_object("distillation", self.distillation)
        self.make_config()  # a wrong value shows before anything is loaded
        self.make_distillation()

    def make_config(self) -> Sparse24Config | None:
        """None for the dense control run."""
        if self.method == "dense":
            return None
        targets = self.target_modules
        if isinstance(targets, list) and len(targets) == 1:  # argparse cannot tell one word from a list of one
            targets = targets[0]
        return Sparse24Config.from_dict({"method": self.method, "target_modules": targets, **self.sparse24})

    def make_distillation(self) -> DistillationConfig | None:
        """None without a teacher."""
        if self.teacher is None:
            if self.distillation:
                raise ValueError("distillation is for a teacher; give --teacher, a name on the Hub or a directory")
            return None
        if self.method == "dense":
            raise ValueError("teacher is for sparse methods; method='dense' is a plain Trainer")
        unknown = sorted(self.distillation.keys() - {f.name for f in fields(DistillationConfig)})
        if unknown:
            raise ValueError(f"distillation: {unknown} are no fields of DistillationConfig")
        return DistillationConfig(**self.distillation)


OWN_ARGUMENTS = (ModelArguments, DataArguments, SparseArguments)
ARGUMENTS = (*OWN_ARGUMENTS, TrainingArguments)
USAGE = "python recipes/train.py [FILE.yaml] [--flag value ...]"


class _HelpOnOwnFlags(argparse.Action):
    """`--help` without the flags of TrainingArguments, among which one would not find ours."""

    def __call__(self, parser, *args):
        more = (
            "--help-all lists every flag of transformers.TrainingArguments as well: --output_dir, --max_steps, "
            "--learning_rate, --per_device_train_batch_size, --bf16, ..."
        )
        HfArgumentParser(OWN_ARGUMENTS, usage=USAGE, epilog=more).print_help()
        parser.exit()


def parse_arguments(argv: list[str] | None = None) -> tuple:
    """The four dataclasses from command-line flags, optionally after a YAML file that gives their defaults."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = HfArgumentParser(ARGUMENTS, allow_abbrev=False, add_help=False, usage=USAGE)
    own = {"action": _HelpOnOwnFlags, "nargs": 0, "default": argparse.SUPPRESS}
    parser.add_argument("-h", "--help", **own, help="list the flags of this script")
    parser.add_argument("--help-all", action="help", help="list those of TrainingArguments as well")
    if argv and argv[0].endswith((".yaml", ".yml")):
        parser.set_defaults(**read_yaml(argv.pop(0)))
    return parser.parse_args_into_dataclasses(argv, look_for_args_file=False)


class _Loader(yaml.SafeLoader):
    """Reads 1e-4 as a number, as YAML 1.2 and JSON do; PyYAML's YAML 1.1 asks for 1.0e-4 and makes it a text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def read_yaml(path: str) -> dict:
    """Flags from a YAML file, numbers as text: argparse then checks them as on the command line."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file")
    settings = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: must be a mapping of flags to values")
    known = {f.name for cls in ARGUMENTS for f in fields(cls) if f.init}
    unknown = sorted(str(key) for key in settings.keys() - known)
    if unknown:
        raise ValueError(f"{path}: unknown keys {unknown}; `python recipes/train.py --help-all` lists the flags")
    return {key: str(value) if isinstance(value, int | float) else value for key, value in settings.items()}


def make_model(args: ModelArguments, tokenizer: PreTrainedTokenizerBase, block_size: int) -> PreTrainedModel:
    """A model with pretrained or fresh weights that fits the tokenizer and the block size."""
    auto_class = AutoModelForMaskedLM if args.objective == "masked" else AutoModelForCausalLM
    dtype = getattr(torch, args.dtype)
    if args.model_name_or_path is not None:
        model = auto_class.from_pretrained(args.model_name_or_path, dtype=dtype)
    else:
        _check_choice("model_type", args.model_type, CONFIG_MAPPING)
        config_class = CONFIG_MAPPING[args.model_type]
        unknown = [name for name in args.config_overrides if not hasattr(config_class(), name)]
        if unknown:
            raise ValueError(f"config_overrides: {unknown} are no fields of {config_class.__name__}")
        ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        config = config_class(**{"vocab_size": len(tokenizer), **ids, **args.config_overrides})
        model = auto_class.from_config(config, dtype=dtype)
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and block_size > positions:
        raise ValueError(f"block_size={block_size}: the model has {positions} positions; take at most that many")
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, the model embeds {rows}; use the model's own")
    return model


def make_trainer(
    model_args: ModelArguments, data_args: DataArguments, sparse_args: SparseArguments, training_args: TrainingArguments
) -> Trainer:
    """A Sparse24Trainer, or a plain Trainer for `method="dense"`, with its model and data."""
    set_seed(training_args.seed)
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name or model_args.model_name_or_path)
    if model_args.objective == "masked" and tokenizer.mask_token is None:
        raise ValueError("the tokenizer has no mask_token, which objective='masked' needs; take one of a masked model")
    model = make_model(model_args, tokenizer, data_args.block_size)
    with training_args.main_process_first(desc="tokenizing"):
        train, validation = make_datasets(data_args, tokenizer, training_args.seed)
    if model_args.objective == "masked":
        collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=data_args.mlm_probability)
    else:
        collator = collate_causal
    shared = {
        "model": model,
        "args": training_args,
        "train_dataset": train,
        "eval_dataset": validation,
        "processing_class": tokenizer,
        "data_collator": collator,
    }
    if sparse_args.method != "dense":
        return Sparse24Trainer(
            **shared,
            sparse24_config=sparse_args.make_config(),
            teacher=sparse_args.teacher,
            distillation=sparse_args.make_distillation(),
        )
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(f"method='dense': {model_args.model_name_or_path} is a 2:4 model; take a dense one as control")
    return Trainer(**shared)


def collate_causal(examples: list[dict]) -> dict[str, torch.Tensor]:
    """A batch of blocks. Labels are the inputs; the model shifts them."""
    input_ids = torch.tensor([example["input_ids"] for example in examples])
    return {"input_ids": input_ids, "labels": input_ids.clone()}


def checkpoint_to_resume(args: TrainingArguments) -> str | bool | None:
    """What `Trainer.train` goes on from: None to start afresh, True for the last checkpoint in `output_dir`.

    Raises:
        ValueError: a fresh run whose checkpoints would mix with those of an earlier one. `save_total_limit` would
            delete the new ones first, and a later resume would take the old run's.
    """
    given = args.resume_from_checkpoint
    resume = {"true": True, "false": None}.get(str(given).lower(), given)
    last = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
    if resume is None and last is not None and args.save_strategy != SaveStrategy.NO:
        raise ValueError(
            f"output_dir={args.output_dir!r}: holds {Path(last).name} of an earlier run; --resume_from_checkpoint true "
            f"goes on from it; to start afresh, name another directory or delete its checkpoints"
        )
    return resume


def main(argv: list[str] | None = None) -> Trainer:
    """Train, evaluate and save, as the arguments say; returns the trainer."""
    arguments = parse_arguments(argv)
    training_args = arguments[-1]
    resume = checkpoint_to_resume(training_args)  # before anything is loaded
    trainer = make_trainer(*arguments)
    if isinstance(trainer, Sparse24Trainer) and trainer.is_world_process_zero():
        print(trainer.patch_report)
    result = trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    if trainer.eval_dataset is not None:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(min(metrics["eval_loss"], 100))
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    return trainer


def _check_choice(name: str, value: str, allowed: Iterable[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed)}")


def _json_object(name: str, value: dict | str | None) -> dict:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}={value!r}: not JSON ({error})") from error
    if not isinstance(value, dict | None):
        raise ValueError(f"{name}={value!r}: must be a JSON object, as '{{\"key\": 1}}'")
    return value or {}


if __name__ == "__main__":
    main().accelerator.end_training()  # leave together: a process that exits early takes the others down
