"""The config of a checkpoint, and the class of its model."""

import os

import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel


def read_config(checkpoint: str | os.PathLike) -> PretrainedConfig:
    """The config of a model in a directory or on the Hub. OSError: there is none."""
    check_name(checkpoint)
    return AutoConfig.from_pretrained(checkpoint)


def check_name(checkpoint: str | os.PathLike) -> None:
    """Raise OSError for a path that is no directory: the Hub would answer with its rules for names."""
    name = os.fspath(checkpoint)
    if not os.path.isdir(name) and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise OSError(f"{name} is no directory")


def model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class that a checkpoint was saved from, or the first with a head that Transformers has for its type."""
    for name in config.architectures or []:
        saved = getattr(transformers, name, None)
        if isinstance(saved, type) and issubclass(saved, PreTrainedModel):
            return saved
    for head in ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageTextToText"):
        classes = getattr(transformers, f"AutoModelFor{head}")._model_mapping
        if type(config) in classes:
            return classes[type(config)]
    raise ValueError(
        f"Transformers has no language model for {type(config).__name__} with architectures={config.architectures!r}"
    )
