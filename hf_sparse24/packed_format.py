"""The packed form in modules and files: names of its tensors, what `config.json` says of them, what can be wrong.

A packed weight is two tensors of its module in the place of the Parameter `weight`: `packed_weight_values` and
`packed_weight_mask` (see `sparse24_kernels.Packed`). int8 values have a third, `packed_weight_scales`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from sparse24_kernels import Pattern

PACKED_INDEX = "packed.safetensors.index.json"

VALUES = ("float", "int8")  # in the weight's own dtype, or as int8 with a scale for each row and 128 weights


@dataclass(frozen=True)
class PackedFormat:
    """The entry `packed` of a packed model's `config.json`; docs/packed_format.md has the format."""

    weights: Mapping[str, Pattern]  # the pattern of each packed weight, by its name in the dense model's `state_dict`
    values: str = "float"  # see `VALUES`
    export: str | None = None  # what every file's header says too; None of a model that no export has made

    VERSION: ClassVar[int] = 3  # of the format, in files too

    @classmethod
    def from_dict(cls, values: object) -> "PackedFormat":
        """Read what `to_dict` wrote. ValueError: with the key, its value and what is allowed."""
        if not isinstance(values, dict):
            raise ValueError(f"packed={values!r}: must be a dict")
        version, weights, export = (values.get(key) for key in ("version", "weights", "export"))
        if type(version) is not int or version != cls.VERSION:
            raise ValueError(f"packed.version={version!r}: this version of hf_sparse24 reads {cls.VERSION}")
        stored = values.get("values")
        if stored not in VALUES:
            raise ValueError(f"packed.values={stored!r}: must be one of {list(VALUES)}")
        if not isinstance(weights, dict) or not weights:
            raise ValueError("packed.weights must have the pattern of each packed weight by its name, and at least one")
        if not isinstance(export, str | None):
            raise ValueError(f"packed.export={export!r}: must be what the headers of the files say")
        try:
            patterns = {name: Pattern.parse(text) for name, text in weights.items()}
        except ValueError as error:
            raise ValueError(f"packed.weights: {error}") from error
        return cls(patterns, stored, export)

    def to_dict(self) -> dict[str, object]:
        weights = {name: str(pattern) for name, pattern in self.weights.items()}
        named = {} if self.export is None else {"export": self.export}
        return {"version": self.VERSION, "values": self.values, "weights": weights} | named


def buffer_names(name: str) -> tuple[str, str, str]:
    """Names of a packed weight's values, mask and, of int8 values, scales: in its module, or by whole name in files."""
    path, dot, name = name.rpartition(".")
    # Transformers renames or splits what begins like the weights of some architectures, so these begin differently.
    values, mask, scales = (f"{path}{dot}packed_{name}_{part}" for part in ("values", "mask", "scales"))
    return values, mask, scales


def packed_weight_name(buffer: str) -> str | None:
    """The weight that a tensor in a checkpoint is a packed part of, by its name; None of any other."""
    match = re.fullmatch(r"(.*\.)?packed_(.+)_(values|mask|scales)", buffer)
    return None if match is None else f"{match[1] or ''}{match[2]}"


def check_values(values: str, format: str = "packed") -> None:
    """Raise ValueError for values that nothing stores so."""
    if not isinstance(values, str) or values not in VALUES:
        raise ValueError(f"values={values!r}: must be one of {list(VALUES)}")
    if values != "float" and format != "packed":
        raise ValueError(f"values={values!r}: with format={format!r} they keep the model's dtype; use format='packed'")
