"""convert_checkpoint makes an export of a `sparse-24-bitmask` checkpoint, which compressed-tensors 0.9 to 0.14 wrote.

compressed-tensors 0.15 and vLLM have dropped the format. Of each sparse weight `NAME.weight` `[out, in]` its files have

    NAME.compressed  [out, in / 2]        the kept values of each row, in order, in the dtype of the weight
    NAME.bitmask     [out, ceil(in / 8)]  uint8; bit i % 8 of byte i // 8 says whether column i is kept: two of four are
    NAME.shape       [2, 1]               out and in

Tensors are read, checked and written one at a time, by their names; no model has weights meanwhile.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from sparse24_kernels import Pattern
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..config import SavedConfig, Sparse24Config
from ..facts import RunFacts
from ..methods import ONESHOT_METHOD
from ..metrics import all_finite
from ..weights.packed_weight import PACKED_INDEX, PackedFormat, buffer_names, pack_exactly
from .export import NO_FILE, WEIGHT_FILES, in_files, make_fingerprint, refuse_other_models, write_weights
from .lazy_tensors import LazyTensors
from .manifest import Tensors, read_json, write_manifest
from .packed_files import empty_packed, make_packed
from .replacing import CONFIG, replaced_model
from .safetensors_file import header_hash

BITMASK = "sparse-24-bitmask"
_PARTS = ("compressed", "bitmask", "shape")
_BY_ROWS = (-1, Pattern(2, 4))


def convert_checkpoint(
    source: Path,
    directory: str | os.PathLike,
    empty: PreTrainedModel | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write the model in `source` to `directory`, as `export_model` does: an export there is replaced as a whole.

    Values stay what they are, bit for bit. Quantized ones (FP8, int8) stay quantized, in a checkpoint that says so.

    Args:
        empty: None for a dense export; for a packed one the model on the meta device, whose weights the files must
            have by their names in its `state_dict`. It is changed.

    Raises:
        ValueError: the checkpoint has another format, or is damaged; or it cannot be packed: it is quantized, or
            Transformers renames its tensors while it loads them; or `directory` has another model than an export.
        OSError: a file is missing or cut short.
    """
    config, is_bitmask = read_dense_config(source, empty is not None)
    tensors = _read_tensors(source)
    lazy = _lazy_tensors(source, tensors, is_bitmask, empty is not None)
    packed = tuple(each.packed for each in lazy if each.packed is not None)
    if empty is not None:
        _check_names(empty, packed, lazy)
    format, index = ("dense", SAFE_WEIGHTS_INDEX_NAME) if empty is None else ("packed", PACKED_INDEX)
    files = in_files(lazy, format, max_shard_size)
    fingerprint = make_fingerprint(config, files, ((name, tensors.read(name)) for name in tensors.names))
    refuse_other_models(Path(directory))
    with replaced_model(directory, outdated=WEIGHT_FILES) as new:
        sparse, hashes = write_weights(new, files, index, fingerprint)
        modules = [name.removesuffix(".weight") for name in sparse]
        ours = Sparse24Config(method=ONESHOT_METHOD, target_modules=modules or "all-linear")
        if empty is not None:
            form = PackedFormat(packed, {file: header_hash(new / file) for file in hashes})
            config |= {
                "quantization_config": SavedConfig(ours, RunFacts(packed=form)).to_dict(),
                "transformers_weights": NO_FILE,
            }
        (new / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if (source / GENERATION_CONFIG_NAME).exists():
            shutil.copyfile(source / GENERATION_CONFIG_NAME, new / GENERATION_CONFIG_NAME)
        write_manifest(new, format, sparse, hashes, SavedConfig(ours).to_dict(), {})


def read_dense_config(source: Path, to_pack: bool) -> tuple[dict[str, Any], bool]:
    """What `config.json` of the dense checkpoint says, and whether this one has bitmasks.

    ValueError: there is nothing to convert, or what there is cannot be packed.
    """
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
    # vLLM refuses any sparsity_config, also one of dense weights; what quantizes them besides stays.
    if any(quantization.get(key) for key in ("config_groups", "kv_cache_scheme", "transform_config")):
        if to_pack:
            raise ValueError(f"{path}: the model is quantized, and packed weights are not; take --format dense")
        config["quantization_config"] = quantization
    return config, format == BITMASK


def _read_tensors(source: Path) -> Tensors:
    """The tensors of all files; ValueError: they are not where the index says."""
    tensors = Tensors(source)
    if SAFE_WEIGHTS_NAME not in tensors.files:
        index = source / SAFE_WEIGHTS_INDEX_NAME
        listed = read_json(index)["weight_map"]
        wrong = sorted(name for name, _ in listed.items() ^ tensors.names.items())
        if wrong:
            raise ValueError(f"{index}: {wrong[0]} is not in the file that it lists; copy or download it again")
    return tensors


def _lazy_tensors(source: Path, tensors: Tensors, is_bitmask: bool, to_pack: bool) -> list[LazyTensors]:
    """All tensors of the export, in the order of the files."""
    masked = next((name for name in tensors.names if name.endswith(".bitmask")), None)
    if masked and not is_bitmask:
        raise ValueError(f"{source} has {masked}, and its config.json says that weights are dense; download it again")
    made: dict[str, LazyTensors] = {}
    for name, file in tensors.names.items():
        module, _, part = name.rpartition(".")
        if not (is_bitmask and part in _PARTS):
            made[name] = _unchanged(f"{source / file}: {name}", tensors, name, is_bitmask)
        elif module not in made:
            made[module] = _sparse(f"{source / file}: {module}", tensors, module, to_pack)
    if (is_bitmask or to_pack) and made.keys() <= tensors.names.keys():
        raise ValueError(f"{source} has no weights in {BITMASK}: no tensor's name ends with .bitmask")
    return list(made.values())


def _unchanged(where: str, tensors: Tensors, name: str, is_bitmask: bool) -> LazyTensors:
    like = tensors.like(name)
    # Without bitmasks, zeros alone say which weights are sparse.
    groups = None if is_bitmask or like.dim() != 2 else _BY_ROWS
    return LazyTensors({name: like}, lambda: {name: _finite(where, tensors.read(name))}, groups)


def _sparse(where: str, tensors: Tensors, module: str, to_pack: bool) -> LazyTensors:
    """The dense weight of a module, or its packed form."""
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
    if to_pack and (values.itemsize == 1 or not values.dtype.is_floating_point):
        raise ValueError(f"{where}: values of {values.dtype} are not packed; take --format dense")

    def dense() -> Tensor:
        return _finite(where, decompress(where, tensors.read(names[0]), tensors.read(names[1])))

    if not to_pack or columns % 4:
        like = torch.empty(rows, 2 * columns, dtype=values.dtype, device="meta")
        return LazyTensors({weight: like}, lambda: {weight: dense()}, _BY_ROWS)
    form = dict(zip(buffer_names(weight), empty_packed((rows, 2 * columns), values.dtype, 1)[:2]))

    def packed() -> Mapping[str, Tensor]:
        exact = pack_exactly(dense(), -1)
        assert exact is not None  # it has two of each four, and is finite
        return dict(zip(form, exact[:2]))

    return LazyTensors(form, packed, packed=weight)


def decompress(where: str, values: Tensor, bitmask: Tensor) -> Tensor:
    """The dense weight, `[out, in]`, of its values `[out, in / 2]` and bitmask `[out, ceil(in / 8)]`.

    ValueError, which begins with `where`: the bitmask does not keep two of each four.
    """
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


def _check_names(model: PreTrainedModel, packed: tuple[str, ...], tensors: list[LazyTensors]) -> None:
    """Raise ValueError where `from_pretrained` would not find all that the model on the meta device has."""
    make_packed(model, PackedFormat(packed, {}))
    written = {name: like.shape for each in tensors for name, like in each.like.items()}
    tied = getattr(model, "all_tied_weights_keys", {})
    for name, tensor in model.state_dict().items():
        if name not in tied and written.get(name) != tensor.shape:
            raise ValueError(
                f"{type(model).__name__} has {name} {tuple(tensor.shape)}, and the checkpoint does not: it lacks it, "
                f"or Transformers renames its tensors, which packed ones cannot be; take --format dense"
            )
