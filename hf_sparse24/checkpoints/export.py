"""export_model: a checkpoint that loads in every engine, no import needed."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..adapters.merging import without_adapters
from ..weight import sparse_weights, wrong_states
from .replacing import CONFIG, replaced_model

_WEIGHT_FILES = re.compile(r"model-\d+-of-\d+\.safetensors|model\.safetensors(\.index\.json)?")

_OF_A_RUN = ("trainer_state.json", "optimizer.pt", "optimizer.bin", "scheduler.pt")
"""Files of a checkpoint that training resumes from."""


@torch.no_grad()
def export_model(model: nn.Module, directory: str | os.PathLike) -> None:
    """Save `model` as a plain Transformers checkpoint of the weights it computes with.

    Sparse layers are written as ordinary weights with zeros (dense ones after a dense tail), without masks, scales
    or `quantization_config`, so any engine reads them. The model itself is left as it is. To go on training 2:4,
    keep a `save_pretrained` checkpoint, which has the dense master weights.

    Args:
        model: a patched model; DDP, DataParallel and torch.compile are looked through, and PEFT's active adapters are
            merged for the export, so that LoRA and DoRA cost nothing and stay 2:4. Export in one process of many.
        directory: made if absent. A model that it holds is replaced as a whole: at every instant, also where the
            process is killed, the directory has the old model or the new one (see `replacing.py`). Other files in it,
            such as a tokenizer's, stay.

    Raises:
        ValueError: the model is not patched (use `save_pretrained`), is sharded, has masks or scales that its method
            cannot have made, or adapters that do not merge into 2:4 weights; or the directory is a training
            checkpoint, whose dense master weights would be lost.
        RuntimeError: another process is exporting into the directory.
    """
    with without_adapters(_unwrapped(model)) as plain:
        _export(plain, directory)


def _export(model: Any, directory: str | os.PathLike) -> None:
    weights = sparse_weights(model)
    wrong = wrong_states(weights)
    if wrong:
        raise ValueError(f"the model is damaged, load it again: {wrong}")
    state_dict = model.state_dict()
    for name, weight in weights.items():
        if weight.run_state.phase != "dense":
            state_dict[name] = weight.method.merged(weight)
        for kept in weight.beside(name):
            del state_dict[kept]
    _refuse_training_checkpoint(Path(directory))
    with replaced_model(directory, outdated=_WEIGHT_FILES) as new, _without_quantization_config(model):
        model.save_pretrained(new, state_dict=state_dict)


def _unwrapped(model: nn.Module) -> PreTrainedModel:
    """The model that patch_model got, out of what was put around it later."""
    while True:
        kind = {cls.__name__ for cls in type(model).__mro__}
        if "OptimizedModule" in kind:
            model = model._orig_mod  # type: ignore[assignment]  # attributes of a Module are Tensor | Module
        elif kind & {"DistributedDataParallel", "DataParallel"}:
            model = model.module  # type: ignore[assignment]  # as above
        else:
            break
    kinds = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    if kinds & {"FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}:
        raise ValueError("the model is sharded; gather its state_dict into an unwrapped model, and export that")
    if "OptimizedModule" in kinds:
        raise ValueError("parts of the model are compiled; export the model that they were compiled from")
    if not sparse_weights(model):
        raise ValueError("the model is not patched; use model.save_pretrained(directory)")
    if getattr(getattr(model, "config", None), "quantization_config", None) is None:
        raise ValueError(f"{type(model).__name__} is no model that patch_model got: export the one that was patched")
    return model  # type: ignore[return-value]  # patch_model gives only Transformers' models a quantization_config


def _refuse_training_checkpoint(directory: Path) -> None:
    found = [name for name in _OF_A_RUN if (directory / name).exists()]
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        config = {}
    except ValueError as error:
        raise ValueError(f"{directory / CONFIG} is no JSON ({error}); export into another directory") from error
    saved: Any = config.get("quantization_config") if isinstance(config, dict) else None
    if isinstance(saved, dict) and saved.get("quant_method") == "sparse24":
        found.append(f"{CONFIG} with quantization_config")
    if found:
        raise ValueError(
            f"{directory} is a training checkpoint ({', '.join(found)}): an export would overwrite its dense master "
            f"weights; export into another directory"
        )


@contextmanager
def _without_quantization_config(model: PreTrainedModel) -> Iterator[None]:
    config = model.config.quantization_config
    del model.config.quantization_config
    try:
        yield
    finally:
        model.config.quantization_config = config
