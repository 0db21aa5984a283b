"""export_model writes checkpoints to share: `dense` loads in every engine, `packed` has 9/16 of the bytes in bf16.

Tensors are computed one file at a time, so an export needs the memory of one file besides the model.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from ..config import SavedConfig
from ..extensions import adapters_in, extensions
from ..files import read_json
from ..methods import ONESHOT_METHOD
from ..packed_format import PACKED_INDEX, PackedFormat, check_values
from ..patching.masters import packed_config
from ..patching.ownership import check_not_offloaded, match_config, name_parts, unwrap
from ..patching.packing import check_packable
from ..patching.refusals import reject_non_finite
from ..progress import Progress, get_logger
from ..weights.rules import AVERAGED
from ..weights.sharding import is_sharded, local, rank
from ..weights.sparse_weight import first_of_each, sparse_weights, wrong_states
from ..weights.storage import PACKED, TRAINED
from .lazy_tensors import NOT_FINITE, LazyTensors, dense_tensors, packed_tensors
from .manifest import FORMATS, MANIFEST, SparseGroups, sparse_dim, write_manifest
from .replacing import CONFIG, replaced_model
from .safetensors_file import read_headers, write_safetensors

logger = get_logger(__name__)

Files = dict[str, list[LazyTensors]]  # the tensors by the name of their file, in the order of writing

WEIGHT_FILES = re.compile(
    rf"(model|packed)((-[0-9a-f]{{8}})?-\d+-of-\d+\.safetensors|\.safetensors(\.index\.json)?)|{re.escape(MANIFEST)}"
)
"""Names of the weight files of a model, which are removed when an export replaces it."""

NO_FILE = "import hf_sparse24 (0.3 or later) before you load this model: its weights are packed"
"""Stored as the weights' file name, so that loading without hf_sparse24 fails with this text."""

# Files of an adapter, of a training run, and weights that an export would hide.
_OTHERS = ["adapter_config.json", "trainer_state.json", "optimizer.pt", "optimizer.bin", "scheduler.pt"]
_OTHERS += ["pytorch_model.bin", "pytorch_model.bin.index.json"]


@torch.no_grad()
def export_model(
    model: nn.Module,
    directory: str | os.PathLike,
    format: str = "dense",
    max_shard_size: int | str = "5GB",
    values: str = "float",
) -> None:
    """Save the weights that `model` computes with, for others to use; docs/guides/export.md tells more.

    To go on training 2:4, keep a `save_pretrained` checkpoint, which has the dense master weights.

    Args:
        model: a patched model, without adapters; DDP, DataParallel and torch.compile are looked through. All processes
            that share its weights by FSDP2 or tensor parallelism call this together, and the first one writes.
            Otherwise export in one process of many.
        directory: made if absent. An export in it is replaced as a whole, once the new files are complete. Where a
            process is killed as it replaces files, nothing loads, never a mixture. Other files, such as a tokenizer's,
            stay.
        format: `"dense"`, ordinary weights with zeros in them, which any engine reads; `"packed"`, sparse weights
            without their zeros, 9/16 of their bytes in bf16 at 2:4 or 16:32, which `from_pretrained` reads with
            hf_sparse24 imported.
        max_shard_size: bytes of one file at most, such as `"5GB"`; a larger tensor has a file to itself.
        values: of a packed export: `"float"`, exactly those that the model computes with; `"int8"`, rounded, with a
            scale for each row and 128 weights: 5/16 of the bytes in bf16.

    Raises:
        ValueError: the model is not patched, cannot be exported in this format, or has NaN or inf in its weights; or
            the directory holds a training checkpoint, an adapter or another model that is no export.
        BlockingIOError: another process is exporting into the directory.

    Examples:
        >>> from transformers import AutoModelForCausalLM
        >>> model = AutoModelForCausalLM.from_pretrained("gpt2")
        >>> _ = patch_model(model, Sparse24Config(method="fixed-mask"))
        >>> export_model(model, "my-export", format="packed")
        >>> packed = AutoModelForCausalLM.from_pretrained("my-export")
    """
    if format not in FORMATS:
        raise ValueError(f"format={format!r}: must be one of {list(FORMATS)}")
    check_values(values, format)
    model, directory = unwrapped(model), Path(directory)
    weights = sparse_weights(model, TRAINED, every_name=True)
    wrong = wrong_states(sparse_weights(model))
    if wrong:
        raise ValueError(f"the model is damaged, load it again ({AVERAGED}): {wrong}")
    reject_non_finite(model.named_parameters(), NOT_FINITE)
    if format == "packed":
        check_packable(model)
        if tied := sorted(weights.keys() - first_of_each(weights).keys()):
            what = f"{tied[0]} is the weight of another layer too"
            raise ValueError(f"{what}, and Transformers cannot load that packed: export with format='dense'")
    match_config(model)
    # Transformers would name and shape tensors like the last checkpoint or adapter that it converted.
    converted = model.__dict__.pop("_weight_conversions", None)
    try:
        tensors = packed_tensors(model, weights, values) if format == "packed" else dense_tensors(model, weights)
        files = _in_files(tensors, format, max_shard_size)
        refuse_other_models(directory)
        card = extensions.describe_export(model, directory, format, values)
        is_split = any(is_sharded(tensor) for tensor in model.parameters())
        if is_split and rank() != 0:
            for lazy in (lazy for group in files.values() for lazy in group):  # in the order of writing
                lazy.compute()  # gathers it together with the process that writes
        else:
            with replaced_model(directory, outdated=WEIGHT_FILES) as new:
                if card is not None:
                    (new / "README.md").write_text(card, encoding="utf-8", newline="")
                sparse = _write(model, new, files, format, values)
            if not sparse:
                run = next(iter(weights.values())).run
                way = "a run ends sparse without a dense tail (dense_tail=0) and without its method's own adapters"
                logger.warning(f"no weight in {directory} is {run.method.pattern}, in the {run.phase!r} phase: {way}")
        if is_split:
            dist.barrier()  # when any process returns, the export is there
    finally:
        if converted is not None:
            model._weight_conversions = converted


def _in_files(tensors: list[LazyTensors], format: str, max_shard_size: int | str) -> Files:
    """Return the tensors in files of at most `max_shard_size`."""
    limit, size = _number_of_bytes(max_shard_size), 0
    shards: list[list[LazyTensors]] = [[]]
    for lazy in tensors:
        bytes_of_it = sum(tensor.nbytes for tensor in lazy.like.values())
        if shards[-1] and size + bytes_of_it > limit:
            shards.append([])
            size = 0
        shards[-1].append(lazy)
        size += bytes_of_it
    stem, count = "packed" if format == "packed" else "model", len(shards)
    suffixes = [f"-{i:05d}-of-{count:05d}" for i in range(1, count + 1)] if count > 1 else [""]
    return {f"{stem}{suffix}.safetensors": shard for suffix, shard in zip(suffixes, shards)}


def _number_of_bytes(size: int | str) -> int:
    if isinstance(size, int):
        return size
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT])B", size.strip().upper())
    if found is None:
        allowed = "a number of bytes, or one of KB, MB, GB or TB such as '5GB'"
        raise ValueError(f"max_shard_size={size!r}: must be {allowed}")
    return int(float(found[1]) * 1000 ** (1 + "KMGT".index(found[2])))


def _write(model: PreTrainedModel, new: Path, files: Files, format: str, values: str) -> bool:
    """Write a whole checkpoint into the empty folder `new`; return whether any weight in it is sparse."""
    saved: SavedConfig = model.config.quantization_config
    saved = saved if saved.facts.packed is None else packed_config(saved, None)
    fingerprint = make_fingerprint(model.config.quantization_config.to_dict(), files, model.state_dict().items())
    packed = dict(lazy.packed for group in files.values() for lazy in group if lazy.packed is not None)
    fields: dict[str, object] = model.config.__dict__
    names = ["quantization_config", "distributed_config"]
    hidden = {name: fields.pop(name) for name in names if name in fields}
    try:
        if packed:
            model.config.quantization_config = packed_config(saved, PackedFormat(packed, values, fingerprint))
            name_parts(model.config, type(model).__name__)
        type(model).save_pretrained(model, new, state_dict={})  # all but the weights
    finally:
        fields.update(hidden)
        name_parts(model.config, None)
    for path in new.glob("*.safetensors"):
        path.unlink()
    if packed:
        about = read_json(new / CONFIG) | {"transformers_weights": NO_FILE}
        (new / CONFIG).write_text(json.dumps(about, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    sparse, hashes = _write_weights(new, files, PACKED_INDEX if packed else SAFE_WEIGHTS_INDEX_NAME, fingerprint)
    write_manifest(new, format, sparse, hashes, saved.to_dict())
    return bool(packed or sparse)


def _write_weights(new: Path, files: Files, index_name: str, fingerprint: str) -> tuple[SparseGroups, dict[str, str]]:
    """The groups of sparse tensors that are stored dense, and each file's sha256; writes the files and their index."""
    if len(files) > 1:  # a reader with another export's index finds that export's files or an error, never these
        files = {file.replace("-", f"-{fingerprint[:8]}-", 1): group for file, group in files.items()}
    sparse: SparseGroups = {}
    hashes: dict[str, str] = {}
    weight_map: dict[str, str] = {}
    size = 0
    with Progress("export", sum(map(len, files.values())), "tensor", logger.info) as progress:
        for file, group in files.items():
            tensors: dict[str, Tensor] = {}
            for lazy in group:
                for name, tensor in lazy.compute().items():
                    if lazy.groups is not None and (dim := sparse_dim(tensor, *lazy.groups)) is not None:
                        sparse[name] = (dim, lazy.groups[1])
                    tensors[name] = tensor.detach().cpu().contiguous()
                progress.update()
            hashes[file] = write_safetensors(new / file, tensors, fingerprint)
            weight_map |= dict.fromkeys(tensors, file)
            size += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1 or index_name == PACKED_INDEX:  # which from_pretrained reads, also where it names one file
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (new / index_name).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return sparse, hashes


def make_fingerprint(settings: Mapping[str, object], files: Files, weights: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of a sample of the weights, the settings, and what lies where: the same in all files of one export."""
    layout = {file: [list(lazy.like) for lazy in group] for file, group in files.items()}
    digest = hashlib.sha256(repr((settings, layout)).encode())
    for name, tensor in weights:
        tensor = local(tensor)
        flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor[:1].reshape(-1)
        sample = flat[:: max(1, flat.numel() // 256)].contiguous().view(torch.uint8).cpu()
        digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """The patched model of Transformers inside DDP, DataParallel or torch.compile; ValueError: there is none."""
    model = unwrap(model)
    if adapters_in(model) or hasattr(model, "get_base_model"):
        way = "export what PEFT's merge_and_unload() returns, of a copy if training goes on"
        raise ValueError(f"the model has adapters: {way}; model.save_pretrained(directory) saves the adapters alone")
    kinds = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    if "OptimizedModule" in kinds:
        raise ValueError("parts of the model are compiled; export the model that they were compiled from")
    if sparse_weights(model, PACKED) and not sparse_weights(model, TRAINED):
        way = f"patch_model(model, Sparse24Config(method={ONESHOT_METHOD!r})), which keeps its zeros"
        raise ValueError(f"the model is packed: call unpack_model(model), then {way}")
    if not sparse_weights(model, TRAINED):
        raise ValueError("the model is not patched; use model.save_pretrained(directory)")
    check_not_offloaded(model)
    if getattr(getattr(model, "config", None), "quantization_config", None) is None:
        way = "plain = unpatch_model(copy.deepcopy(model)), then safetensors.torch.save_model(plain, path)"
        raise ValueError(f"{type(model).__name__} is no PreTrainedModel that was patched as a whole: {way}")
    return model  # type: ignore[return-value]  # patch_model gives only Transformers' models a quantization_config


def refuse_other_models(directory: Path) -> None:
    """Raise ValueError where an export would replace files that are no export's."""
    found = [name for name in _OTHERS if (directory / name).exists()]
    names = os.listdir(directory) if directory.exists() else []
    model = sorted(name for name in names if name == CONFIG or WEIGHT_FILES.fullmatch(name))
    weights = [directory / name for name in model if name.endswith(".safetensors")]
    if model and not (weights and all(map(_is_exported, weights))):
        found += model
    if found:
        what = "a training checkpoint, an adapter or another model that is no export of hf_sparse24"
        raise ValueError(f"{directory} holds {what} ({', '.join(found)}); export into another directory")


def _is_exported(file: Path) -> bool:
    """Whether `export_model` wrote a file of weights, which `save_pretrained` may have written over."""
    try:
        return read_headers([file])[1][file.name] is not None
    except OSError:  # cut short: nothing is lost that could be loaded
        return file.with_name(MANIFEST).exists()
