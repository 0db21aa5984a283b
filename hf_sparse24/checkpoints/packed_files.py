"""Three steps of reading a packed checkpoint: check its files, make modules packed, check what was read.

The format: docs/packed_format.md. Only safetensors and JSON are read, so no code of a file is run.
"""

from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import torch
from sparse24_kernels import Packed, Pattern
from sparse24_kernels.formats import scale_columns, unpackable
from transformers import PreTrainedModel

from ..layers.packed import pack_weight
from ..packed_format import PackedFormat, buffer_names, packed_weight_name
from ..patching.targets import aliases_of
from ..run import SparseRun
from ..weights.input_dim import find_input_dim
from ..weights.packed_weight import wrong_packed
from ..weights.sparse_weight import SparseWeight, sparse_weights
from ..weights.storage import PACKED
from .safetensors_file import DTYPES, read_headers


def check_files(packed: PackedFormat, files: Sequence[str | Path]) -> Set[str]:
    """Names of the tensors in files. ValueError: not of `config.json`'s export, or with other packed weights."""
    for file in map(str, files):
        if not file.endswith(".safetensors"):
            raise ValueError(f"{file}: a packed checkpoint has safetensors files alone; nothing was read from this one")
    dtypes, marks = read_headers(files)
    others = sorted(file for file, mark in marks.items() if mark != packed.export)
    if packed.export is not None and others:
        way = "copy or download the whole checkpoint again into an empty directory"
        raise ValueError(f"{others}: not the files that were exported together with config.json; {way}")
    has_int8 = packed.values == "int8"
    for weight in dict.fromkeys([*packed.weights, *filter(None, map(packed_weight_name, dtypes))]):
        values, mask, scales = buffer_names(weight)
        found = {name: dtypes.get(name, "missing") for name in (values, mask, scales)[: 3 if has_int8 else 2]}
        if weight not in packed.weights:
            raise ValueError(f"{values} is in the files, and config.json does not list it in packed.weights")
        floating = (found[scales] if has_int8 else found[values]).startswith(("F", "BF"))
        fits = found[mask] == DTYPES[torch.uint8] and floating and (scales in dtypes) == has_int8
        if not fits or (has_int8 and found[values] != DTYPES[torch.int8]):
            told = f"config.json lists {weight} in packed.weights, with packed.values={packed.values!r}"
            raise ValueError(f"the checkpoint is damaged, copy or download it again: {told}, and it has {found}")
    return frozenset(dtypes)


def empty_packed(shape: tuple[int, ...], dtype: torch.dtype, values: str, pattern: Pattern) -> Packed:
    """The packed form, on the meta device, of a weight `[..., out, in]`."""
    *rows, inputs = shape
    has_int8 = values == "int8"
    kept = torch.empty(*rows, inputs * pattern.n // pattern.m, dtype=torch.int8 if has_int8 else dtype, device="meta")
    scales = torch.empty(*rows, scale_columns(inputs), dtype=dtype, device="meta") if has_int8 else None
    return Packed(kept, torch.empty(*rows, inputs // 8, dtype=torch.uint8, device="meta"), scales, pattern.m)


def make_packed(model: PreTrainedModel, packed: PackedFormat, run: SparseRun | None = None) -> None:
    """Replace the weights that a checkpoint lists by packed ones without values, in a model on the meta device.
    With `run` the values train. ValueError: a name of no linear layer's weight, or one whose sizes cannot be packed.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, pattern in packed.weights.items():
        attribute = name.rpartition(".")[2]
        own = (candidate.rpartition(".")[0] for candidate in aliases_of(model, name))
        module = next((modules[path] for path in own if path in modules), None)
        if module is None:  # such as the head of another class of this architecture
            continue
        weight = module._parameters.get(attribute)
        input_dim = None if weight is None else find_input_dim(module, attribute)
        if weight is None or input_dim is None:
            raise ValueError(f"packed.weights has {name!r}, which is no weight of a linear layer or of stacked experts")
        *stack, out, inputs = weight.shape if input_dim == -1 else weight.transpose(-1, -2).shape
        if reason := unpackable(pattern, inputs):
            raise ValueError(f"packed.weights has {name!r}: {reason}")
        empty = empty_packed((*stack, out, inputs), weight.dtype, packed.values, pattern)
        pack_weight(module, attribute, input_dim, empty, run)
        # Or Transformers would initialise the weight: a copy that is unpacked for that, and lost.
        module._is_hf_initialized = True
    if not sparse_weights(model, PACKED):
        names = [*packed.weights][:5]
        raise ValueError(f"{type(model).__name__} has none of the weights in packed.weights: {names}")


def check_packed(model: PreTrainedModel, weights: Mapping[str, SparseWeight], in_files: Set[str]) -> None:
    """Raise ValueError where a packed weight or its bias was not in the checkpoint, or its tensors are invalid."""
    for name, weight in weights.items():
        module, path = weight.module, name.rpartition(".")[0]
        tensors = dict((*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)))
        stored = tensors.keys() - module._non_persistent_buffers_set
        # An offloaded one is on the meta device, and no longer the tensor that was read.
        kept = {key for key in stored if tensors[key].is_meta and in_files & {*aliases_of(model, f"{path}.{key}")}}
        missing = sorted(key for key in stored - kept if not getattr(tensors[key], "_is_hf_initialized", False))
        found = weight.storage.packed
        wrong = f"{missing} were not in its files" if missing else None
        if not missing and not found.values.is_meta:
            wrong = wrong_packed(found)
        if wrong:
            raise ValueError(f"the checkpoint is damaged, copy or download it again: {name}: {wrong}")
