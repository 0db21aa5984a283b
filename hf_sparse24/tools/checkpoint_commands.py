"""`hf-sparse24 export | inspect | verify`: checkpoints in a directory or on the Hub."""

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from ..checkpoints.export import export_model
from ..checkpoints.manifest import MANIFEST
from ..config import Sparse24Config
from ..files import read_json
from ..methods import ONESHOT_METHOD
from ..methods.settings import SHARED
from ..packed_format import buffer_names
from ..patching.report import group_name, shown_count
from ..patching.surgery import patch_model
from ..progress import Progress, count, duration
from ..weights.sparse_weight import sparse_weights
from . import print_table
from .models import OF_A_TOKENIZER, WEIGHTS, check_destination, local_files, read_model
from .verification import Listing, Tensors, read_listing, verify

_OF_A_MODEL = ["config.json", "generation_config.json", "*.index.json", "sparse24*.json", "adapter_*.json"]
_OF_A_MODEL += ["trainer_state.json", "*_results.json"]


def export(options: argparse.Namespace) -> int:
    """Export a training checkpoint, or a dense export again, with its tokenizer, and print what was written."""
    check_destination(options.directory)  # before anything is downloaded or loaded
    source = local_files(options.checkpoint, [*WEIGHTS, *OF_A_TOKENIZER])
    empty, own = read_model(source)  # a wrong value of the config is told before weights are read
    is_dense = not own and (source / MANIFEST).exists()
    is_packed = "packed" in own and own.get("master") != "packed"
    if not is_dense and (own.get("quant_method") != "sparse24" or is_packed):
        way = "unpack_model(model).save_pretrained makes dense weights of a packed one, recipes/convert_bitmask.py of"
        what = "is no training checkpoint of hf_sparse24 and no dense export"
        raise ValueError(f"{options.checkpoint} {what}; {way} bitmasks")
    listing = read_listing(Tensors(source)) if is_dense else None
    model = load_whole(type(empty), source)
    if listing is not None:
        _patch_export(model, listing, read_json(source / MANIFEST)["config"])
    directory = options.directory
    export_model(model, directory, options.format, options.max_shard_size, options.values)
    others = [path for pattern in OF_A_TOKENIZER for path in source.glob(pattern)]
    others = [path for path in others if not any(path.match(pattern) for pattern in _OF_A_MODEL)]
    for path in others:
        copy = Path(directory) / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        if not (copy.exists() and copy.samefile(path)):
            copy.unlink(missing_ok=True)  # it may be read-only, as what it is a copy of
            shutil.copy2(path, copy)
    if not others:
        print(f"{source} has no tokenizer: tokenizer.save_pretrained({str(directory)!r}) adds one")
    return inspect(argparse.Namespace(checkpoint=directory))


def _patch_export(model: PreTrainedModel, listing: Listing, config: dict[str, Any]) -> None:
    """Patch the model of a dense export by the layers of its config, to keep its zeros. ValueError: one is dense."""
    if not listing.weights:
        raise ValueError(f"{listing.source} lists no sparse weights: the export is dense")
    shared = {name: config[name] for name in SHARED if name in config and name not in ("method", "backend")}
    patch_model(model, Sparse24Config(method=ONESHOT_METHOD, **shared))
    for name, weight in sparse_weights(model).items():
        if not torch.equal(weight.merged(), weight.parameter):
            raise ValueError(f"{name} is not {weight.pattern}, as {listing.source} says; run hf-sparse24 verify")


def load_whole(cls: type[PreTrainedModel], source: Path) -> PreTrainedModel:
    """The model in `source`. ValueError: a tensor is missing or has another size."""
    load: Any = cls.from_pretrained  # its type has no pair
    try:
        model, report = load(source, ignore_mismatched_sizes=True, output_loading_info=True)
    except (RuntimeError, SafetensorError) as error:  # such as experts of different sizes, which it cannot stack
        raise ValueError(f"{source}: {error}") from error
    wrong = {f"it lacks {name}" for name in report["missing_keys"]}
    wrong |= {f"{name} has other sizes than its config.json says" for name, *_ in report["mismatched_keys"]}
    if wrong:
        raise ValueError(f"{source}: {min(wrong)}; copy or download it again")
    return model


def inspect(options: argparse.Namespace) -> int:
    """Print which weights of a checkpoint are sparse, and how large it is."""
    tensors = Tensors(local_files(options.checkpoint))
    listing = read_listing(tensors)
    groups: dict[str, list[int]] = {}
    for name in listing.weights:
        is_dense = name in tensors or listing.format == "dense"
        own = buffer_names(name)
        names = [name] if is_dense else [part for part in own if part in tensors] or [own[0]]
        parts = [tensors.size(part) for part in names]
        has_mask = not is_dense and own[1] in names
        elements = 8 * tensors.size(own[1])[0] if has_mask else parts[0][0]  # 8 weights in a byte
        dense = max(nbytes / max(number, 1) for number, nbytes in parts)  # of int8 values, the size of the scales
        _add(groups, group_name(name), 1, elements, sum(nbytes for _, nbytes in parts), int(elements * dense))
    sparse = {part for name in listing.weights for part in (name, *buffer_names(name))}
    for name in tensors.names.keys() - sparse:
        elements, nbytes = tensors.size(name)
        _add(groups, "everything else", 1, elements, nbytes, nbytes)
    groups["together"] = [sum(column) for column in zip(*groups.values())]
    print(_heading(listing, tensors))
    rows = [["tensors", "number", "weights", "stored", "dense"]]
    for group, (n, weights, stored, dense) in groups.items():
        rows.append([group, str(n), shown_count(weights), _size(stored), _size(dense)])
    print_table(rows)
    return 0


def verify_checkpoint(options: argparse.Namespace) -> int:
    """Read a checkpoint, and print whether what is said to be sparse is; the exit status is 1 where it is not."""
    tensors = Tensors(local_files(options.checkpoint))
    listing = read_listing(tensors)
    found = []
    with Progress("verification", len(listing.files) + len(listing.weights), "tensor") as progress:
        for finding in verify(listing, tensors):
            found.append(finding)
            progress.update()
    print(_heading(listing, tensors))
    groups: dict[str, list[int]] = {}
    for finding in (finding for finding in found if finding.elements):
        _add(groups, group_name(finding.name), 1, finding.problem is None, finding.zeros, finding.elements)
    rows = [["tensors", "number", listing.all_patterns, "zeros"]]
    for group, (n, sparse, zeros, elements) in groups.items():
        rows.append([group, str(n), f"{sparse} of {n}", f"{zeros / elements:.1%}"])
    print_table(rows)
    problems = [finding for finding in found if finding.problem is not None]
    for finding in problems[:20]:
        print(f"FAILED {finding.name}: {finding.problem}")
    if problems:
        print(f"{len(problems)} failed: copy or download the checkpoint again, or export the model again")
    if not listing.weights:
        print("no weight of this export is sparse: it was made in a dense phase of training, or with adapters merged")
    elif not problems:
        files = f", and {count(len(listing.files), 'file')} as exported" if listing.files else ""
        took = f"; read in {duration(progress.seconds)}"
        print(f"verified: all {len(listing.weights)} weights are {listing.all_patterns}{files}{took}")
    return int(bool(problems) or not listing.weights)


def _heading(listing: Listing, tensors: Tensors) -> str:
    has_int8 = any(buffer_names(name)[2] in tensors for name in listing.weights)
    stored = f"{listing.format} with int8 values" if has_int8 else listing.format
    trained = f", trained by {listing.method}" if listing.method else ""
    return f"{stored}{trained}: {len(listing.weights)} weights are {listing.all_patterns}, listed in {listing.source}"


def _add(groups: dict[str, list[int]], group: str, *numbers: int) -> None:
    groups[group] = [a + b for a, b in zip(groups.get(group, [0] * len(numbers)), numbers)]


def _size(number: int) -> str:
    unit, size = next((each for each in (("GB", 1e9), ("MB", 1e6)) if number >= each[1]), ("kB", 1e3))
    return f"{number / size:,.2f} {unit}"
