"""The packed layers of a serving engine, and how they may be split: names and numbers, no engine.

Engines stack some layers, such as q_proj, k_proj and v_proj, to one, and split layers over processes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sparse24_kernels import Pattern
from sparse24_kernels.formats import SCALED

from ..packed_format import PackedFormat

WAY_OUT = "serve a dense export instead: hf-sparse24 export CHECKPOINT DIRECTORY"


def read_format(config: Mapping[str, Any]) -> PackedFormat:
    """The packed weights that the `quantization_config` of a checkpoint lists; ValueError: it has none."""
    if config.get("packed") is None:
        way = "serve an export of it: hf-sparse24 export CHECKPOINT DIRECTORY --format packed"
        raise ValueError(f"this is a training checkpoint (method={config.get('method')!r}); {way}")
    return PackedFormat.from_dict(config["packed"])


def packed_pattern(name: str, stacked: Mapping[str, Sequence[str]], weights: Mapping[str, Pattern]) -> Pattern | None:
    """The pattern of a linear layer of the engine that is packed, None of another; ValueError: its parts differ.
    `stacked` names the parts of layers that the engine stacks: `{"qkv_proj": ["q_proj", ...]}`."""
    path, dot, last = name.rpartition(".")
    parts = [f"{path}{dot}{part}.weight" for part in stacked.get(last, ())]
    own = f"{name}.weight"  # of a layer that is stacked in the file too
    patterns = {part: weights.get(part) for part in (parts if parts and own not in weights else [own])}
    if len({*patterns.values()}) > 1:
        kinds = {part: "dense" if pattern is None else str(pattern) for part, pattern in patterns.items()}
        raise ValueError(f"{name} is one layer here, and its parts are packed differently: {kinds}; {WAY_OUT}")
    return next(iter(patterns.values()))


def check_split(name: str, inputs: int, whole: int, m: int, has_scales: bool) -> None:
    """Raise ValueError where the `inputs` of one process cut through weights that share a byte or a scale."""
    step, part = (SCALED, "scale") if has_scales else (max(8, m), "byte of the mask, or a group")
    if inputs != whole and inputs % step:
        given = f"tensor parallelism gives each process {inputs} of {whole} inputs"
        raise ValueError(f"{name}: {given}, and {step} weights share a {part}: use a multiple of {step}, or {WAY_OUT}")
