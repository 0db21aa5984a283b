"""convert_checkpoint makes a dense export of a `sparse-24-bitmask` checkpoint of compressed-tensors 0.9 to 0.14.

compressed-tensors 0.15 and vLLM have dropped the format. Of each sparse weight `NAME.weight` `[out, in]` its files have

    NAME.compressed  [out, in / 2]        the kept values of each row, in order, in the dtype of the weight
    NAME.bitmask     [out, ceil(in / 8)]  uint8; bit i % 8 of byte i // 8 says whether column i is kept: two of four are
    NAME.shape       [2, 1]               out and in

Tensors are read, checked and written one file at a time, by their names, which Transformers compares with the model's.
"""

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from sparse24_kernels import Pattern
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from ..config import SavedConfig, Sparse24Config
from ..files import read_json
from ..methods import ONESHOT_METHOD
from ..metrics import all_finite
from .export import WEIGHT_FILES, in_files, make_fingerprint, refuse_other_models, write_weights
from .lazy_tensors import LazyTensors
from .manifest import Tensors, write_manifest
from .replacing import CONFIG, replaced_model

BITMASK = "sparse-24-bitmask"
_PARTS = ("compressed", "bitmask", "shape")
_BY_ROWS = (-1, Pattern(2, 4))


def convert_checkpoint(
    source: Path, empty: PreTrainedModel, directory: str | os.PathLike, max_shard_size: int | str = "5GB"
) -> None:
    """Write the model in `source`, which is `empty` on the meta device, to `directory`, as a dense `export_model` does.

    Values keep every bit. Quantized ones (FP8, int8) stay quantized, in a checkpoint that says so. ValueError: the
    checkpoint has another format, other tensors than the model, or is damaged; or `directory` has another model.
    """
    config, is_bitmask = _read_dense_config(source)
    tensors = Tensors(source)
    made = _lazy_tensors(source, tensors, is_bitmask)
    like = {name: tensor for lazy in made for name, tensor in lazy.like.items()}
    options = {"pretrained_model_name_or_path": None, "config": empty.config, "state_dict": like}
    load_whole(type(empty), source, "quantization_config" in config, device_map={"": "meta"}, **options)
    files = in_files(made, "dense", max_shard_size)
    fingerprint = make_fingerprint(config, files, ((name, tensors.read(name)) for name in tensors.names))
    refuse_other_models(Path(directory))
    with replaced_model(directory, outdated=WEIGHT_FILES) as new:
        sparse, hashes = write_weights(new, files, SAFE_WEIGHTS_INDEX_NAME, fingerprint)
        modules = [name.removesuffix(".weight") for name in sparse]
        ours = Sparse24Config(method=ONESHOT_METHOD, target_modules=modules or "all-linear")
        (new / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if (source / GENERATION_CONFIG_NAME).exists():
            shutil.copyfile(source / GENERATION_CONFIG_NAME, new / GENERATION_CONFIG_NAME)
        write_manifest(new, "dense", sparse, hashes, SavedConfig(ours).to_dict())


def _read_dense_config(source: Path) -> tuple[dict[str, Any], bool]:
    """What `config.json` of the dense checkpoint says, and whether this one has bitmasks."""
    path = source / CONFIG
    config = read_json(path)
    said = [config.pop(key, None) for key in ("quantization_config", "compression_config")]
    quantization = next((each for each in said if isinstance(each, dict)), {})
    sparsity = quantization.pop("sparsity_config", None)
    if not isinstance(sparsity, dict) or not sparsity:
        raise ValueError(f"{path} has no sparsity_config of compressed-tensors, so there is nothing to convert")
    format = "marlin-24" if "marlin-24" in json.dumps(quantization) else sparsity.get("format")
    if format not in (BITMASK, "dense"):
        raise ValueError(f"{path}: its weights have the format {format!r}; only {BITMASK!r} is converted")
    # vLLM refuses any sparsity_config, also one of dense weights; quantization stays.
    if any(quantization.get(key) for key in ("config_groups", "kv_cache_scheme", "transform_config")):
        config["quantization_config"] = quantization
    return config, format == BITMASK


def _lazy_tensors(source: Path, tensors: Tensors, is_bitmask: bool) -> list[LazyTensors]:
    """All tensors of the export, in the order of the files."""
    made: dict[str, LazyTensors] = {}
    for name, file in tensors.names.items():
        module, _, part = name.rpartition(".")
        if not (is_bitmask and part in _PARTS):
            like = tensors.like(name)
            # Without bitmasks, zeros alone say which weights are sparse.
            groups = None if is_bitmask or like.dim() != 2 else _BY_ROWS
            compute = partial(_read_finite, f"{source / file}: {name}", tensors, name)
            made[name] = LazyTensors({name: like}, compute, groups)
        elif module not in made:
            made[module] = _sparse(f"{source / file}: {module}", tensors, module)
    if is_bitmask and made.keys() <= tensors.names.keys():
        raise ValueError(f"{source} has no weights in {BITMASK}: no tensor's name ends with .bitmask")
    return list(made.values())


def load_whole(cls: type[PreTrainedModel], source: Path, takes_others: bool = True, **options: Any) -> PreTrainedModel:
    """The model in `source`, or what `options` of `from_pretrained` say. ValueError: a tensor is missing or has another
    size, or, unless `takes_others`, the model has no such tensor. Transformers knows what is tied, renamed or stacked.
    """
    options = {"pretrained_model_name_or_path": source, "ignore_mismatched_sizes": True} | options
    load: Any = cls.from_pretrained  # its type has no pair
    try:
        model, report = load(output_loading_info=True, **options)
    except (RuntimeError, SafetensorError) as error:  # such as experts of different sizes, which it cannot stack
        raise ValueError(f"{source}: {error}") from error
    wrong = {f"it lacks {name}" for name in report["missing_keys"]}
    wrong |= {f"{name} has other sizes than its config.json says" for name, *_ in report["mismatched_keys"]}
    wrong |= set() if takes_others else {f"{name} is no tensor of its model" for name in report["unexpected_keys"]}
    if wrong:
        raise ValueError(f"{source}: {min(wrong)}; copy or download it again")
    return model


def _read_finite(where: str, tensors: Tensors, name: str) -> dict[str, Tensor]:
    return {name: _finite(where, tensors.read(name))}


def _sparse(where: str, tensors: Tensors, module: str) -> LazyTensors:
    """The dense weight of a module."""
    weight = f"{module}.weight"
    names = [f"{module}.{part}" for part in _PARTS]
    absent = [name for name in names if name not in tensors]
    if absent or weight in tensors:
        raise ValueError(f"{where}: the files " + (f"lack {', '.join(absent)}" if absent else f"have {weight} too"))
    values, bitmask, shape = (tensors.like(name) for name in names)
    rows, columns = (*values.shape, 0, 0)[:2] if values.dim() == 2 else (0, 0)
    sizes = tensors.read(names[2]).flatten().tolist() if shape.numel() == 2 else tuple(shape.shape)
    fits = sizes == [rows, 2 * columns] and bitmask.shape == (rows, (columns + 3) // 4) and rows * columns
    if not fits or columns % 2 or bitmask.dtype != torch.uint8:
        parts = f"compressed {tuple(values.shape)}, bitmask {bitmask.dtype} {tuple(bitmask.shape)}, shape {sizes}"
        raise ValueError(f"{where}: these do not fit each other: {parts}")

    def dense() -> dict[str, Tensor]:
        return {weight: _finite(where, decompress(where, tensors.read(names[0]), tensors.read(names[1])))}

    like = torch.empty(rows, 2 * columns, dtype=values.dtype, device="meta")
    return LazyTensors({weight: like}, dense, _BY_ROWS)


def decompress(where: str, values: Tensor, bitmask: Tensor) -> Tensor:
    """The dense weight `[out, in]` of values `[out, in / 2]` and bitmask `[out, ceil(in / 8)]`; errors name `where`."""
    rows, columns = values.shape[0], 2 * values.shape[1]
    bits = (bitmask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1).bool()
    mask = bits[:, :columns]
    if bits[:, columns:].any() or (mask.unflatten(1, (-1, 4)).sum(-1, dtype=torch.uint8) != 2).any():
        raise ValueError(f"{where}: its bitmask does not keep two of each four; copy or download it again")
    raw = values.view(torch.uint8) if values.itemsize == 1 else values  # FP8 has no masked_scatter_
    return raw.new_zeros(rows, columns).masked_scatter_(mask, raw).view(values.dtype)


def _finite(where: str, tensor: Tensor) -> Tensor:
    if not all_finite(tensor):
        raise ValueError(f"{where} has NaN or inf; copy or download it again")
    return tensor
