"""The class of a checkpoint's model, from its config."""

import transformers
from transformers import PretrainedConfig, PreTrainedModel


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
