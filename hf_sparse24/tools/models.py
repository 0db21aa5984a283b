"""The start of each command: find a checkpoint, make its model without weights, check where a result goes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from ..checkpoints.export import refuse_other_models
from ..config import SavedConfig
from ..tables import shown

WEIGHTS = ("*.safetensors", "*.json")
OF_A_TOKENIZER = ("*.json", "*.txt", "*.model", "*.spm", "*.jinja", "*.tiktoken", "additional_chat_templates/*.jinja")
# The kinds of models whose code lies with a checkpoint, by the class that loads them.
AUTOS = {"AutoModelForCausalLM": "causal", "AutoModelForMaskedLM": "masked", "AutoModel": "encoder"}
_TYPES = {"model_type": str, "architectures": list, "quantization_config": dict, "transformers_weights": str}


def read_model(checkpoint: str | os.PathLike, trust: bool = False) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model of a checkpoint on the meta device, and the `quantization_config` of its config.json, which it has not.
    With `trust`, of the code that lies with it. OSError: there is no config. ValueError: it is damaged."""
    check_name(checkpoint)
    if os.path.isdir(checkpoint) and not os.path.exists(os.path.join(checkpoint, "config.json")):
        raise OSError(f"{checkpoint} has no config.json: it is not the directory of a model")
    try:
        values, _ = PretrainedConfig.get_config_dict(checkpoint)
        for name, kind in _TYPES.items():
            if not isinstance(values.get(name), kind | None):
                raise ValueError(f"{name}={shown(values[name])}: must be a {kind.__name__}")
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust)
        own = config.__dict__.pop("quantization_config", None) or {}
        if own.get("quant_method") == SavedConfig.quant_method:
            SavedConfig.from_dict(own)
        autos = [auto for auto in AUTOS if trust and auto in (getattr(config, "auto_map", None) or ())]
        with torch.device("meta"):
            if autos:
                return getattr(transformers, autos[0]).from_config(config, trust_remote_code=True), own
            return model_class(config)._from_config(config), own
    except (OSError, ImportError):  # of the Hub, or of a package that is missing
        raise
    except Exception as error:  # Transformers raises anything where a value is wrong
        if "trust_remote_code" in str(error):
            raise ValueError(f"{checkpoint} has its own code: prune runs it with --trust-remote-code") from error
        text = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
        raise ValueError(f"{checkpoint}: its config.json is damaged, or of another version: {text}") from error


def check_name(checkpoint: str | os.PathLike) -> None:
    """Raise OSError for a GGUF file, and a path that is no directory: the Hub would answer with its rules for names."""
    name = os.fspath(checkpoint)
    files = [Path(name), *(Path(name).glob("*") if os.path.isdir(name) else ())]
    gguf = [file for file in files if file.suffix.lower() == ".gguf" and file.is_file()]
    if gguf and not os.path.exists(os.path.join(name, "config.json")):
        way = "give the folder of the dense model that it was made of, with a config.json"
        raise OSError(f"{gguf[0]} is a GGUF file, for llama.cpp: {way}")
    if not os.path.isdir(name) and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise OSError(f"{name} is no directory")


def local_files(checkpoint: str, patterns: Sequence[str] = WEIGHTS) -> Path:
    """The directory of a checkpoint; downloaded, where it is a name on the Hub."""
    check_name(checkpoint)
    if os.path.isdir(checkpoint):
        return Path(checkpoint)
    try:
        # What lies in folders, such as a training checkpoint, is not read; a pattern's `*` takes "/" too.
        others = [f"*/{pattern}" for pattern in WEIGHTS]
        return Path(snapshot_download(checkpoint, allow_patterns=list(patterns), ignore_patterns=others))
    except (OSError, ValueError) as error:  # of the Hub: no such name, no network
        reason = str(error).strip().splitlines()[0]
        way = f"the Hub does not give it ({reason}): give the path of a directory"
        raise OSError(f"{checkpoint!r} is no directory here, and {way}") from error


def check_destination(directory: str) -> None:
    if not directory:
        raise ValueError("the directory to write to is empty: name one")
    if directory.startswith("~"):
        raise ValueError(f"{directory}: the shell has left '~' as it is; write the path out")
    if Path(directory).is_file():
        raise ValueError(f"{directory} is a file: name the directory to write to")
    refuse_other_models(Path(directory))


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
    named = f"{type(config).__name__} with architectures={config.architectures!r}"
    raise ValueError(f"Transformers has no model for {named}")
