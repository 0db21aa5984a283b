"""The model of a training script: pretrained or with fresh weights, whole or sharded while it is loaded."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from arguments import UsageError, check_choice, json_object
from transformers import CONFIG_MAPPING, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.distributed import DistributedConfig

from hf_sparse24 import Sparse24Config


@dataclass
class AnyModelArguments:
    model_name_or_path: str | None = field(default=None, metadata={"help": "Pretrained weights to start from."})
    model_type: str | None = field(default=None, metadata={"help": "Architecture to train from scratch, as 'llama'."})
    config_overrides: dict | str | None = field(
        default=None, metadata={"help": "With model_type: JSON of config fields, as '{\"hidden_size\": 256}'."}
    )
    dtype: str = field(default="float32", metadata={"help": "Of the master weights: float32 or bfloat16."})
    distributed: dict | str | None = field(
        default=None,
        metadata={
            "help": "JSON of transformers' DistributedConfig, as '{\"tp_size\": 2}'. Default: accelerate shards."
        },
    )

    def __post_init__(self):
        if (self.model_name_or_path is None) == (self.model_type is None):
            given = "neither" if self.model_type is None else "both"
            raise UsageError(
                f"{given} of model_name_or_path (pretrained) and model_type (from scratch) given; give one"
            )
        self.config_overrides = json_object("config_overrides", self.config_overrides)
        self.distributed = json_object("distributed", self.distributed)
        unknown = sorted(self.distributed.keys() - DistributedConfig.__dataclass_fields__.keys())
        if unknown:
            raise UsageError(f"distributed: {unknown} are no fields of DistributedConfig")
        if self.config_overrides and self.model_type is None:
            raise UsageError("config_overrides is for model_type; a pretrained model keeps its own config")
        check_choice("dtype", self.dtype, ("float32", "bfloat16"))

    def check_reader(self, flag: str) -> None:
        """Raises a UsageError where nothing says what reads the data of a model from scratch."""
        if self.model_type is not None and getattr(self, flag) is None:
            raise UsageError(f"model_type={self.model_type!r} needs {flag}: a name on the Hub or a directory")


@dataclass
class ModelArguments(AnyModelArguments):
    tokenizer_name: str | None = field(default=None, metadata={"help": "Default: model_name_or_path."})

    def __post_init__(self):
        super().__post_init__()
        self.check_reader("tokenizer_name")


@dataclass
class ImageModelArguments(AnyModelArguments):
    image_processor_name: str | None = field(default=None, metadata={"help": "Default: model_name_or_path."})

    def __post_init__(self):
        super().__post_init__()
        self.check_reader("image_processor_name")


def make_model(
    args: ModelArguments,
    auto_class: type,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    training_args: TrainingArguments,
    sparse_config: Sparse24Config | None = None,
    **head: Any,
) -> PreTrainedModel:
    """A model with pretrained or fresh weights that fits the tokenizer and sequences of `length` tokens.

    The other arguments are those of `load_model`.
    """
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    fresh = {"vocab_size": len(tokenizer), **ids}
    model = load_model(args, auto_class, training_args, sparse_config, fresh, **head)
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise UsageError(f"sequences of {length} tokens: the model has {positions} positions; take at most that many")
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise UsageError(f"the tokenizer has {len(tokenizer)} tokens, the model embeds {rows}; use the model's own")
    return model


def load_model(
    args: AnyModelArguments,
    auto_class: type,
    training_args: TrainingArguments,
    sparse_config: Sparse24Config | None,
    fresh: dict[str, Any],
    **head: Any,
) -> PreTrainedModel:
    """A model with pretrained or fresh weights.

    With `distributed`, fresh weights go through `output_dir/initial`: Transformers shards what it loads from files.
    Such a model is patched while it is loaded, before it is sharded; the trainer patches any other.

    Args:
        auto_class: such as `AutoModelForCausalLM`.
        sparse_config: what the trainer patches with; None for the dense control run.
        fresh: config fields of a model from scratch, which `config_overrides` may change.
        head: config fields of its head, such as `num_labels`.
    """
    loading = {"dtype": getattr(torch, args.dtype)}
    if args.distributed:
        loading["distributed_config"] = DistributedConfig(**args.distributed)
        loading["quantization_config"] = sparse_config
    if args.model_name_or_path is not None:
        return auto_class.from_pretrained(args.model_name_or_path, **loading, **head)
    model = auto_class.from_config(_fresh_config(args, fresh | head), dtype=loading["dtype"])
    if args.distributed:
        directory = Path(training_args.output_dir) / "initial"
        with training_args.main_process_first(local=False, desc="writing the initial weights"):
            if training_args.process_index == 0:
                model.save_pretrained(directory)
        model = auto_class.from_pretrained(directory, **loading)
    return model


def _fresh_config(args: AnyModelArguments, fields: dict[str, Any]):
    check_choice("model_type", args.model_type, CONFIG_MAPPING)
    config_class = CONFIG_MAPPING[args.model_type]
    unknown = [name for name in args.config_overrides if not hasattr(config_class(), name)]
    if unknown:
        raise UsageError(f"config_overrides: {unknown} are no fields of {config_class.__name__}")
    return config_class(**(fields | args.config_overrides))
