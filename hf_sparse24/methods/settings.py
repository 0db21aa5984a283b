"""Settings of a method: frozen dataclasses whose every field has its default, its check and its meaning side by side.

A method's `Settings` combines the groups it needs and adds its own fields:

    @dataclass(frozen=True, kw_only=True)
    class Settings(MaskedDecaySettings, PhaseSettings, GemmSettings):
        mask_interval: int | float = setting(40, is_positive_length, "...")
"""

import dataclasses
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

from ..facts import FACTS
from ..tables import shown

Check = Callable[[Any], str | None]  # says what a value must be, where it is not; None where it is

SHARED = ("method", "pattern", "layer_patterns", "target_modules", "exclude_modules", "layers_to_transform", "backend")
"""The fields of a config that every method has; all others are settings of the method."""

RESERVED = (*SHARED, *FACTS, "settings", "quant_method", "hf_sparse24_version")
"""Names that no setting can have, because a config has them already."""

GRADIENT_ESTIMATORS = ("dense", "mvue", "mvue-approx", "mvue-1:2")
LENGTH = "an int counts optimizer steps, a float below 1 is a fraction of training"  # for settings with `is_length`


def setting(default: object, check: Check, text: str) -> Any:
    """A field of a `Settings` class.

    Args:
        default: the value of a config that does not give one; of a type that JSON has.
        check: says what a wrong value must be, and returns None for a right one: `one_of(...)`, `is_non_negative`,
            `is_length`, `is_positive_length`, or a function of yours.
        text: what the setting means, with the source of the default. `describe_settings` shows it.
    """
    return dataclasses.field(default=default, metadata={"check": check, "text": text})


def with_default(group: "type[MethodSettings]", name: str, default: object, source: str) -> Any:
    """The field `name` of a group such as `GemmSettings`, for a method with another default, whose source is said."""
    (field,) = (field for field in dataclasses.fields(group) if field.name == name)
    return setting(default, field.metadata["check"], f"{field.metadata['text']}; the default is that of {source}")


def one_of(*allowed: object) -> Check:
    def check(value: object) -> str | None:
        # `type` too: 0 == False, and an unhashable value equals nothing.
        known = any(type(value) is type(choice) and value == choice for choice in allowed)
        return None if known else f"must be one of {list(allowed)}"

    return check


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_non_negative(value: object) -> str | None:
    # Not `< inf`: an int may be larger than any float.
    return None if is_number(value) and 0 <= value <= sys.float_info.max else "must be a finite number >= 0"


def is_length(value: object) -> str | None:
    """A length of training, as Transformers writes them: an int is optimizer steps, a float below 1 a fraction."""
    if is_number(value) and 0 <= value <= (sys.maxsize if isinstance(value, int) else math.nextafter(1, 0)):
        return None
    return "must be an int >= 0 (optimizer steps) or a float in [0, 1) (a fraction)"


def is_positive_length(value: Any) -> str | None:
    return is_length(value) or (None if value > 0 else "must be at least 1 step or a fraction above 0")


def to_steps(length: int | float, total: int) -> int:
    """A length in optimizer steps: an int is one already, a float is a fraction of `total`, rounded up."""
    # The tiny subtraction keeps a fraction like 0.07 of 100 from being rounded up to 8 by float noise.
    return math.ceil(length * total - 1e-9) if isinstance(length, float) else length


def sparse_steps(total: int, start: int | float, tail: int | float, start_name: str = "dense_start") -> range:
    """The steps of a run that are sparse, counted from 0, by the lengths of dense training at its start and its tail.
    Without a dense tail they do not end. ValueError: no step is sparse."""
    if total < 1:
        raise ValueError(f"total_steps={total}: a run needs at least 1 optimizer step")
    start_steps, tail_steps = to_steps(start, total), to_steps(tail, total)
    if start_steps + tail_steps >= total:
        lengths = f"{start_name}={start} is {start_steps} steps, dense_tail={tail} is {tail_steps}"
        raise ValueError(f"total_steps={total} leaves no sparse step: {lengths}; train longer or shorten them")
    return range(start_steps, total - tail_steps if tail_steps else sys.maxsize)


def plain(value: Any) -> Any:
    """A value of a config as JSON has it: scalars of NumPy and torch become Python's."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item") and not getattr(value, "is_meta", False):
        return value.item()
    return value


@dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """The base of all settings: checks every field when it is made.

    Raises:
        ValueError: a value that a field's check refuses; with the field, the value and what is allowed.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if wrong := field.metadata["check"](value):
                raise ValueError(f"{field.name}={shown(value)}: {wrong}")


@dataclass(frozen=True, kw_only=True)
class GemmSettings(MethodSettings):
    """How the operands of the three GEMMs other than the sparse weight are pruned and rounded."""

    weight_grad: str = setting(
        "dense",
        one_of(*GRADIENT_ESTIMATORS),
        "how the output gradient dZ is pruned in the grad_weight GEMM (dW = dZ^T X), in groups along tokens: 'dense' "
        "not at all; at random and without bias, 'mvue' 2:4 with the least variance, 'mvue-approx' 2:4 by the cheaper "
        "two-draw estimate, 'mvue-1:2' to one of every two",
    )
    input_grad: str = setting(
        "dense",
        one_of(*GRADIENT_ESTIMATORS),
        "how the output gradient dZ is pruned in the grad_input GEMM (dX = dZ W), in groups along output features; the "
        "values mean the same as those of weight_grad",
    )
    activations: str = setting(
        "dense",
        one_of("dense", "2:4"),
        "'2:4' prunes the activations X in the output GEMM (Z = X W^T): the two largest magnitudes of every four "
        "features are kept; 'dense' leaves them as they are",
    )
    fp8: bool = setting(
        False,
        one_of(True, False),
        "True rounds the operands of all three GEMMs to FP8, E4M3 forward and E5M2 backward, with one current scale "
        "per tensor, and multiplies in the model's dtype: a simulation, which costs time",
    )


@dataclass(frozen=True, kw_only=True)
class PhaseSettings(MethodSettings):
    """When a run is sparse."""

    dense_start: int | float = setting(0, is_length, f"length of dense training before sparsity starts: {LENGTH}")
    dense_tail: int | float = setting(0, is_length, f"length of dense training after sparsity ends: {LENGTH}")


@dataclass(frozen=True, kw_only=True)
class StandardSettings(PhaseSettings, GemmSettings):
    """The settings of a method that declares none: dense phases, and what happens in the three GEMMs."""


@dataclass(frozen=True, kw_only=True)
class MasterSettings(MethodSettings):
    """The tensor that the optimizer updates, for a method with a fixed mask. Goes first among a method's groups."""

    master: str = setting(
        "dense",
        one_of("dense", "packed"),
        "what the optimizer updates: 'dense' the whole weight; 'packed' the kept values alone, so that weights, "
        "gradients and the optimizer's state take half the memory at 2:4 (linear layers only)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in dataclasses.fields(StandardSettings):
            value = getattr(self, field.name, field.default)
            if self.master == "packed" and value != field.default:
                why = "a packed master has no zeros to train densely, and its GEMMs are dense math"
                way = f"leave {field.name} at {field.default!r}, or take master='dense'"
                raise ValueError(f"{field.name}={shown(value)}: {why}; {way}")
