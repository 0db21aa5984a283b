"""The packed form in modules and files: names of its tensors, what `config.json` says of them, what can be wrong.

A packed weight is two tensors of its module in the place of the Parameter `weight`: `packed_weight_values` and
`packed_weight_indices` (see `sparse24_kernels.Packed`). int8 values have a third, `packed_weight_scales`.
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from sparse24_kernels import Packed

PACKED_WEIGHTS = "packed.safetensors"
PACKED_INDEX = "packed.safetensors.index.json"

VALUES = {"float": 1, "int8": 2}
"""What packed values are stored as, and the version of the format that has them: the weight's own dtype, or int8 with a
scale for each row and 128 weights."""


@dataclass(frozen=True)
class PackedFormat:
    """What `config.json` says of a packed model; docs/packed_format.md has the format.

    Attributes:
        weights: names of the packed weights, as in the dense model's `state_dict`.
        files: sha256 of each file's header by the file's name; may be empty. A header has the name, dtype, shape and
            place of every tensor, and a number that all files of one export have in common.
        version: of the format; see `VALUES`.
    """

    weights: tuple[str, ...]
    files: dict[str, str]
    version: int = 1

    LATEST: ClassVar[int] = 2

    @classmethod
    def from_dict(cls, values: Any) -> "PackedFormat":
        """Read what `to_dict` wrote.

        Raises:
            ValueError: with the key, its value and what is allowed.
        """
        if not isinstance(values, dict):
            raise ValueError(f"packed={values!r}: must be a dict")
        version, weights, files = (values.get(key) for key in ("version", "weights", "files"))
        if type(version) is not int or not 1 <= version <= cls.LATEST:
            raise ValueError(f"packed.version={version!r}: this version of hf_sparse24 reads 1 to {cls.LATEST}")
        if not isinstance(weights, list) or {*map(type, weights)} != {str} or len({*weights}) < len(weights):
            raise ValueError("packed.weights must be a non-empty list of names, each of them once")
        if not isinstance(files, dict) or not all(isinstance(text, str) for text in (*files, *files.values())):
            raise ValueError("packed.files must be a dict from the names of files to the sha256 of their headers")
        return cls(tuple(weights), files, version)

    @property
    def file(self) -> str:
        """The name of the only file, or of the index of several, as `export_model` writes them."""
        return PACKED_INDEX if len(self.files) > 1 else next(iter(self.files), PACKED_WEIGHTS)

    def to_dict(self) -> dict[str, Any]:
        return {"version": self.version, "weights": list(self.weights), "files": self.files}


def buffer_names(name: str) -> tuple[str, str, str]:
    """What a packed weight's values, indices and (of int8 values) scales are called, in its module or, by its whole
    name, in a file."""
    path, dot, name = name.rpartition(".")
    # Transformers renames or splits what begins like the weights of some architectures, so these begin differently.
    values, indices, scales = (f"{path}{dot}packed_{name}_{part}" for part in Packed._fields)
    return values, indices, scales


def packed_weight_name(buffer: str) -> str | None:
    """The weight that a tensor in a checkpoint is values, indices or scales of, by its name; None of any other."""
    match = re.fullmatch(r"(.*\.)?packed_(.+)_(values|indices|scales)", buffer)
    return None if match is None else f"{match[1] or ''}{match[2]}"


def format_version(values: str, format: str = "packed") -> int:
    """The version of the packed format that stores values so; ValueError of unknown ones."""
    if not isinstance(values, str) or values not in VALUES:
        raise ValueError(f"values={values!r}: must be one of {list(VALUES)}")
    if values != "float" and format != "packed":
        raise ValueError(f"values={values!r}: with format={format!r} they keep the model's dtype; use format='packed'")
    return VALUES[values]
