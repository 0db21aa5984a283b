"""export_model: checkpoints to share. `dense` loads in every engine, `packed` has 9/16 of the bytes in bf16.

Tensors are made and written one at a time, so that an export needs little memory beside the model.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, logging

from ..adapters.merging import without_adapters
from ..config import Sparse24Config
from ..inference import check_packable
from ..packed import PackedFormat
from ..weight import sparse_weights, wrong_states
from .manifest import MANIFEST, Manifest, sparse_dim
from .parts import Part, dense_parts, packed_parts
from .replacing import CONFIG, replaced_model
from .safetensors_file import Hashes, write_safetensors

FORMATS = ("dense", "packed")

WEIGHT_FILES = re.compile(rf"model-\d+-of-\d+\.safetensors|model\.safetensors(\.index\.json)?|{re.escape(MANIFEST)}")
"""Names of the files that belong to a model's weights, and go when another model takes its place."""

_OF_A_RUN = ("trainer_state.json", "optimizer.pt", "optimizer.bin", "scheduler.pt")
"""Files of a checkpoint that training resumes from."""

_ADAPTER = "adapter_config.json"


@torch.no_grad()
def export_model(
    model: nn.Module, directory: str | os.PathLike, format: str = "dense", max_shard_size: int | str = "5GB"
) -> None:
    """Save the weights that `model` computes with, for others to use.

    The model itself is left as it is. To go on training 2:4, keep a `save_pretrained` checkpoint, which has the dense
    master weights. Beside the weights goes `sparse24.json`, which lists the sparse ones; `hf-sparse24 verify` reads it.

    Args:
        model: a patched model; DDP, DataParallel and torch.compile are looked through, and PEFT's active adapters are
            merged for the export, so that LoRA and DoRA cost nothing and stay 2:4. Export in one process of many.
        directory: made if absent. A model that it holds is replaced as a whole: at every instant, also where the
            process is killed, the directory has the old model or the new one (see `replacing.py`). Other files in it,
            such as a tokenizer's, stay.
        format: `"dense"`, ordinary weights with zeros in them, which any engine reads; after a dense tail, dense ones.
            `"packed"`, 2:4 weights without their zeros, 9/16 of their bytes in bf16, which `from_pretrained` reads
            where hf_sparse24 is imported (docs/packed_format.md). Sparse weights whose input size is no multiple of 8
            are stored with their zeros.
        max_shard_size: bytes of one file at most, such as `"5GB"`; a larger tensor has a file of its own.

    Raises:
        ValueError: the model is not patched (use `save_pretrained`), is sharded, has masks or scales that its method
            cannot have made, or adapters that do not merge into 2:4 weights; a packed export of a model that is dense
            or sparse by another pattern; or the directory is a training checkpoint, whose dense master weights would
            be lost, or holds an adapter.
        RuntimeError: another process is exporting into the directory.
    """
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: must be one of {list(FORMATS)}")
    with without_adapters(unwrapped(model)) as plain:
        _export(plain, Path(directory), format, max_shard_size)


def _export(model: Any, directory: Path, format: str, max_shard_size: int | str) -> None:
    weights = sparse_weights(model)
    wrong = wrong_states(weights)
    if wrong:
        raise ValueError(f"the model is damaged, load it again: {wrong}")
    if format == "packed":
        check_packable(model)
    _refuse_other_models(directory)
    with _own_layout(model), replaced_model(directory, outdated=WEIGHT_FILES) as new:
        parts = packed_parts(model, weights) if format == "packed" else dense_parts(model, weights)
        _write(model, new, parts, format, max_shard_size)


def _write(model: PreTrainedModel, new: Path, parts: list[Part], format: str, max_shard_size: int | str) -> None:
    """Write a whole checkpoint into the empty folder `new`."""
    config: Sparse24Config = model.config.quantization_config
    with _quantization_config(model, None):
        with _no_progress_bar():
            model.save_pretrained(new, state_dict={})  # all but the weights
        for path in new.glob("*.safetensors"):
            path.unlink()
        sparse, files = _write_weights(model, new, parts, max_shard_size)
    packed = None
    if format == "packed":
        names = tuple(part.packed for part in parts if part.packed is not None)
        packed = config.packed_as(PackedFormat(names, {name: hashes.header for name, hashes in files.items()}))
    with _quantization_config(model, packed):
        model.config.save_pretrained(new)
    manifest = Manifest(format, sparse, {name: hashes.file for name, hashes in files.items()}, config.to_dict())
    manifest.write(new)


def _write_weights(
    model: PreTrainedModel, new: Path, parts: list[Part], max_shard_size: int | str
) -> tuple[dict[str, int], dict[str, Hashes]]:
    """Write the files of the weights, and their index where there are several.

    Returns:
        The dimension of the groups of each sparse tensor, and the hashes of each file.
    """
    shards = split_state_dict_into_shards_factory(
        {str(i): part for i, part in enumerate(parts)},
        get_storage_size=lambda part: sum(tensor.nbytes for tensor in part.like.values()),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    metadata = {"format": "pt", "hf_sparse24_export": _fingerprint(model)}
    files: dict[str, Hashes] = {}
    sparse: dict[str, int] = {}
    weight_map: dict[str, str] = {}
    with logging.tqdm(total=len(parts), desc="Exporting", unit="tensor") as progress:
        for file, keys in shards.filename_to_tensors.items():
            chosen = [parts[int(key)] for key in keys]
            like = {name: tensor for part in chosen for name, tensor in part.like.items()}
            files[file] = write_safetensors(new / file, like, _made(chosen, sparse, progress), metadata)
            weight_map |= dict.fromkeys(like, file)
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": weight_map}
        (new / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return sparse, files


def _made(parts: list[Part], sparse: dict[str, int], progress: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the parts one by one, while `sparse` gets the dimension of the groups of those that are sparse."""
    for part in parts:
        if part.packed is not None:
            sparse[part.packed] = -1
        for name, tensor in part.make().items():
            if part.weight is not None and part.packed is None:
                dim = sparse_dim(tensor, part.weight.input_dim, part.weight.method.pattern)
                sparse |= {} if dim is None else {name: dim}
            yield name, tensor
        progress.update()


def _fingerprint(model: PreTrainedModel) -> str:
    """A number that files of one export have in common: the same model gives the same files, another one others."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor[:1].reshape(-1)
        sample = flat[:: max(1, flat.numel() // 256)].contiguous().view(torch.uint8).cpu()
        digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()


def unwrapped(model: nn.Module) -> PreTrainedModel:
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


def _refuse_other_models(directory: Path) -> None:
    if (directory / _ADAPTER).exists():
        raise ValueError(
            f"{directory} holds an adapter ({_ADAPTER}), which would be loaded on top of the export; export into "
            f"another directory"
        )
    found = [name for name in _OF_A_RUN if (directory / name).exists()]
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        config = {}
    except ValueError as error:
        raise ValueError(f"{directory / CONFIG} is no JSON ({error}); export into another directory") from error
    saved: Any = config.get("quantization_config") if isinstance(config, dict) else None
    if isinstance(saved, dict) and saved.get("quant_method") == "sparse24" and "packed" not in saved:
        found.append(f"{CONFIG} with quantization_config")
    if found:
        raise ValueError(
            f"{directory} is a training checkpoint ({', '.join(found)}): an export would overwrite its dense master "
            f"weights; export into another directory"
        )


@contextmanager
def _own_layout(model: PreTrainedModel) -> Iterator[None]:
    """Let Transformers convert names and shapes as the architecture asks, not as the checkpoint or the adapter that was
    loaded last did, which it remembers."""
    remembered = model.__dict__.pop("_weight_conversions", None)
    try:
        yield
    finally:
        if remembered is not None:
            model._weight_conversions = remembered  # a list that Module's types do not know


@contextmanager
def _quantization_config(model: PreTrainedModel, config: Sparse24Config | None) -> Iterator[None]:
    """Let the model's config say something else for a while; None for nothing about sparsity."""
    own = model.config.quantization_config
    if config is None:
        del model.config.quantization_config
    else:
        model.config.quantization_config = config
    try:
        yield
    finally:
        model.config.quantization_config = own


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Without Transformers' bar, which would count the weights that it is not given."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
