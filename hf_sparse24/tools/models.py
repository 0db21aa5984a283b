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
    """The class that a checkpoint was saved from, or else the first for its type, with a head before without."""
    for name in config.architectures or []:
        saved = getattr(transformers, name, None)
        if isinstance(saved, type) and issubclass(saved, PreTrainedModel):
            return saved
    # Most encoder-decoders have a class of their decoder alone too, for causal language models.
    decoding = ("Seq2SeqLM", "SpeechSeq2Seq") if config.is_encoder_decoder else ("CausalLM",)
    heads = (*decoding, "MaskedLM", "ImageTextToText", "ZeroShotImageClassification", "ImageClassification")
    for auto in (*(f"AutoModelFor{head}" for head in heads), "AutoModel"):
        classes = getattr(transformers, auto)._model_mapping
        if type(config) in classes:
            found = classes[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ValueError(
        f"Transformers has no model for {type(config).__name__} with architectures={config.architectures!r}"
    )
