"""export_model: a checkpoint that loads in every engine, no import needed."""

import os
import re
import tempfile
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from ..weight import sparse_weights


@torch.no_grad()
def export_model(model: PreTrainedModel, directory: str | os.PathLike) -> None:
    """Save `model` as a plain Transformers checkpoint of the weights it computes with.

    Sparse layers are written as ordinary weights with zeros (dense ones after a dense tail), without masks, scales
    or `quantization_config`, so any engine reads them. The model itself is left as it is. To go on training 2:4,
    keep a `save_pretrained` checkpoint, which has the dense master weights.

    Args:
        model: a patched model.
        directory: made if absent. Its files are replaced one by one, each whole or not at all.

    Raises:
        ValueError: the model is not patched (use `save_pretrained`).
    """
    weights = sparse_weights(model)
    if not weights:
        raise ValueError("the model is not patched; use model.save_pretrained(directory)")
    if getattr(getattr(model, "config", None), "quantization_config", None) is None:
        raise ValueError(f"{type(model).__name__} is no model that patch_model got: export the one that was patched")
    state_dict = model.state_dict()
    for name, weight in weights.items():
        if weight.run_state.phase != "dense":
            state_dict[name] = weight.method.merged(weight)
        for kept in weight.beside(name):
            del state_dict[kept]
    directory = os.path.abspath(directory)
    os.makedirs(directory, exist_ok=True)
    # Beside the target, so that moving is a rename. The config goes last: a model without one is not yet a model.
    with tempfile.TemporaryDirectory(dir=os.path.dirname(directory), prefix=".export-") as staging:
        with _without_quantization_config(model):
            model.save_pretrained(staging, state_dict=state_dict)
        names = os.listdir(staging)
        for name in sorted(names, key=lambda name: (name == "config.json", name)):
            os.replace(os.path.join(staging, name), os.path.join(directory, name))
    # Weights of an earlier, sharded checkpoint would contradict these.
    for name in set(os.listdir(directory)) - set(names):
        if re.fullmatch(r"model-\d+-of-\d+\.safetensors|model\.safetensors(\.index\.json)?", name):
            os.remove(os.path.join(directory, name))


@contextmanager
def _without_quantization_config(model: PreTrainedModel):
    config = model.config.quantization_config
    del model.config.quantization_config
    try:
        yield
    finally:
        model.config.quantization_config = config
