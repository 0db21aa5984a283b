"""export_model: checkpoints to share. `dense` loads in every engine, `packed` has 9/16 of the bytes in bf16.

Tensors are made and written one at a time, so that an export needs little memory beside the model.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, logging

from ..adapters.merging import adapters_in, without_adapters
from ..config import Sparse24Config
from ..patching.ownership import adopt, unwrap
from ..patching.packing import check_packable, packed_config
from ..progress import Progress, get_logger
from ..weights.packed_weight import PackedFormat
from ..weights.sharding import is_sharded, local, rank
from ..weights.sparse_weight import sparse_weights
from ..weights.state_check import wrong_states
from .manifest import MANIFEST, Manifest, sparse_dim
from .parts import Part, dense_parts, packed_parts
from .replacing import CONFIG, replaced_model
from .safetensors_file import Hashes, write_safetensors

logger = get_logger(__name__)

FORMATS = ("dense", "packed")

WEIGHT_FILES = re.compile(rf"model-\d+-of-\d+\.safetensors|model\.safetensors(\.index\.json)?|{re.escape(MANIFEST)}")
"""Names of the files that belong to a model's weights, and go when another model takes its place."""

_OF_A_RUN = ("trainer_state.json", "optimizer.pt", "optimizer.bin", "scheduler.pt")
"""Files of a checkpoint that training resumes from."""

_WEIGHTS = ("model.safetensors", SAFE_WEIGHTS_INDEX_NAME, "pytorch_model.bin", "pytorch_model.bin.index.json")
"""A model that Transformers has saved has one of these."""

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
            merged for the export, so that LoRA and DoRA cost nothing and stay 2:4. Where FSDP2 or tensor parallelism
            shards it, all processes export it together: they gather one tensor at a time, and the first one writes.
            Otherwise export in one process of many.
        directory: made if absent. A model that it holds is replaced as a whole: at every instant, also where the
            process is killed, the directory has the old model or the new one. Other files in it, such as a tokenizer's,
            stay.
        format: `"dense"`, ordinary weights with zeros in them, which any engine reads; after a dense tail, dense ones.
            `"packed"`, 2:4 weights without their zeros, 9/16 of their bytes in bf16, which `from_pretrained` reads
            where hf_sparse24 is imported (docs/packed_format.md). Sparse weights whose input size is no multiple of 8
            are stored with their zeros.
        max_shard_size: bytes of one file at most, such as `"5GB"`; a larger tensor has a file of its own.

    Raises:
        ValueError: the model is not patched (use `save_pretrained`), is sharded by FSDP1 or DeepSpeed ZeRO-3, or
            sharded with adapters, has masks or scales that its method cannot have made, or adapters that do not merge
            into 2:4 weights; a packed export of a model that is dense or sparse by another pattern; or the directory
            is a training checkpoint, whose dense master weights would be lost, holds an adapter, or another model
            that is no export.
        RuntimeError: another process is exporting into the directory; of a sharded model, also that the process which
            writes has failed.

    Examples:
        >>> from transformers import AutoModelForCausalLM
        >>> model = AutoModelForCausalLM.from_pretrained("gpt2")
        >>> _ = patch_model(model)
        >>> export_model(model, "my-export", format="packed")
        >>> packed = AutoModelForCausalLM.from_pretrained("my-export")
    """
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: must be one of {list(FORMATS)}")
    model = unwrapped(model)
    if _is_sharded(model) and adapters_in(model):
        raise ValueError(
            "the model is sharded, and adapters are merged into whole weights: save the adapter, load it on its base "
            "in one process, and export that"
        )
    with without_adapters(model) as plain:
        _export(plain, Path(directory), format, max_shard_size)


def _export(model: Any, directory: Path, format: str, max_shard_size: int | str) -> None:
    weights = sparse_weights(model)
    wrong = wrong_states(weights)
    if wrong:
        raise ValueError(f"the model is damaged, load it again: {wrong}")
    if format == "packed":
        check_packable(model)
    adopt(model)  # where a part was patched by itself
    with _own_layout(model):
        parts = packed_parts(model, weights) if format == "packed" else dense_parts(model, weights)
        files = _files(parts, max_shard_size)
        with _made_together(files) if _is_sharded(model) else nullcontext(True) as writes:
            if writes:
                if weights and all(weight.run.is_dense for weight in weights.values()):
                    logger.warning(
                        f"the model is in its dense phase, as after a dense tail, and so is its export: no weight in "
                        f"{directory} is 2:4. A run with dense_tail=0 ends sparse"
                    )
                _refuse_other_models(directory)
                with replaced_model(directory, outdated=WEIGHT_FILES) as new:
                    _write(model, new, files, format)


def _is_sharded(model: nn.Module) -> bool:
    return any(is_sharded(tensor) for tensor in model.parameters())


@contextmanager
def _made_together(files: dict[str, list[Part]]) -> Iterator[bool]:
    """Let all processes make the same tensors in the same order, which gathers them, also where the first one, which
    writes them within this block, fails.

    Gives whether this process writes.
    """
    made = 0

    def counted(part: Part) -> Part:
        def make() -> Mapping[str, Tensor]:
            nonlocal made
            made += 1
            return part.make()

        return part._replace(make=make)

    parts = [part for chosen in files.values() for part in chosen]
    files.update({file: [counted(part) for part in chosen] for file, chosen in files.items()})
    problem: list[BaseException | None] = [None]
    try:
        yield rank() == 0
    except Exception as error:
        problem = [error]
    for part in parts[made:]:
        part.make()
    seen = [None if problem[0] is None else f"{type(problem[0]).__name__}: {problem[0]}"]
    dist.broadcast_object_list(seen)
    if problem[0] is not None:
        raise problem[0]
    if seen[0] is not None:
        raise RuntimeError(f"process 0, which writes the export, has failed: {seen[0]}")


def _files(parts: list[Part], max_shard_size: int | str) -> dict[str, list[Part]]:
    """The parts by the file that they belong into, in the order of writing."""
    shards = split_state_dict_into_shards_factory(
        {str(i): part for i, part in enumerate(parts)},
        get_storage_size=lambda part: sum(tensor.nbytes for tensor in part.like.values()),
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    return {file: [parts[int(key)] for key in keys] for file, keys in shards.filename_to_tensors.items()}


def _write(model: PreTrainedModel, new: Path, files: dict[str, list[Part]], format: str) -> None:
    """Write a whole checkpoint into the empty folder `new`."""
    config: Sparse24Config = model.config.quantization_config
    with _config_field(model, "distributed_config", None):
        with _config_field(model, "quantization_config", None):
            with _no_progress_bar():
                model.save_pretrained(new, state_dict={})  # all but the weights
            for path in new.glob("*.safetensors"):
                path.unlink()
            sparse, hashes = _write_weights(model, new, files)
        packed = None
        if format == "packed":
            names = tuple(part.packed for parts in files.values() for part in parts if part.packed is not None)
            packed = packed_config(config, PackedFormat(names, {name: found.header for name, found in hashes.items()}))
        with _config_field(model, "quantization_config", packed):
            model.config.save_pretrained(new)
    manifest = Manifest(format, sparse, {name: found.file for name, found in hashes.items()}, config.to_dict())
    manifest.write(new)


def _write_weights(
    model: PreTrainedModel, new: Path, files: dict[str, list[Part]]
) -> tuple[dict[str, int], dict[str, Hashes]]:
    """Write the files of the weights, and their index where there are several.

    Returns:
        The dimension of the groups of each sparse tensor, and the hashes of each file.
    """
    metadata = {"format": "pt", "hf_sparse24_export": _fingerprint(model)}
    hashes: dict[str, Hashes] = {}
    sparse: dict[str, int] = {}
    weight_map: dict[str, str] = {}
    with Progress("export", sum(map(len, files.values())), "tensor", logger.info) as progress:
        for file, parts in files.items():
            like = {name: tensor for part in parts for name, tensor in part.like.items()}
            hashes[file] = write_safetensors(new / file, like, _made(parts, sparse, progress), metadata)
            weight_map |= dict.fromkeys(like, file)
    if len(files) > 1:
        size = sum(tensor.nbytes for parts in files.values() for part in parts for tensor in part.like.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (new / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return sparse, hashes


def _made(parts: list[Part], sparse: dict[str, int], progress: Progress) -> Iterator[tuple[str, Tensor]]:
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
        tensor = local(tensor)
        flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor[:1].reshape(-1)
        sample = flat[:: max(1, flat.numel() // 256)].contiguous().view(torch.uint8).cpu()
        digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """The model that patch_model got, out of what was put around it later."""
    model = unwrap(model)
    kinds = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    if "FullyShardedDataParallel" in kinds:
        raise ValueError("the model is sharded by FSDP1; use FSDP2, or load its checkpoint in one process to export it")
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
    foreign = next((name for name in _WEIGHTS if (directory / name).exists()), None)
    if foreign and config and not (directory / MANIFEST).exists():
        raise ValueError(
            f"{directory} holds a model that is no export of hf_sparse24 ({foreign}), which would be lost; export into "
            f"another directory, or delete that one first"
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
def _config_field(model: PreTrainedModel, name: str, value: Any) -> Iterator[None]:
    """Let a field of the model's config be another for a while; None for absent."""
    fields = model.config.__dict__
    own = {name: fields.pop(name)} if name in fields else {}
    if value is not None:
        setattr(model.config, name, value)
    try:
        yield
    finally:
        fields.pop(name, None)
        fields.update(own)


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
