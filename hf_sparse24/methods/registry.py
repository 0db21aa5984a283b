"""The registry of methods: `METHODS`, `register_method`, and `describe_settings`."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from ..tables import shown
from .base import SparseMethod
from .settings import RESERVED, MethodSettings

METHODS: dict[str, type[SparseMethod]] = {}
"""The registered methods by name: those of this library, and those that `register_method` has added."""

Method = TypeVar("Method", bound=type[SparseMethod])


def register_method(name: str) -> Callable[[Method], Method]:
    """Class decorator: make a `SparseMethod` known by `name`, in configs, checkpoints and on the command line.

    Loading a checkpoint of the method needs the registration too: import the module that has it first.

    Args:
        name: what `Sparse24Config(method=...)` calls it.

    Returns:
        The decorator, which returns the class itself.

    Raises:
        ValueError: a name that another class has (running a notebook's cell again is fine), or a class with neither
            `mask` nor `prune`, with wrong `phases`, or with wrong `Settings`.

    Examples:
        >>> @register_method("my-ste")
        ... class MySTE(METHODS["ste"]):
        ...     def refreshes_state(self, step, total_steps):
        ...         return step % 10 == 0
        >>> Sparse24Config(method="my-ste").method
        'my-ste'
    """

    def register(cls: Method) -> Method:
        if not isinstance(name, str) or not name:
            raise ValueError(f"register_method({name!r}): must be a name")
        taken = METHODS.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"method {name!r} is registered already, by {taken.__module__}.{taken.__qualname__}")
        _check_class(cls)
        cls.name = name
        METHODS[name] = cls
        return cls

    return register


def _check_class(cls: type[SparseMethod]) -> None:
    if not cls.overrides("mask", "prune"):
        raise ValueError(f"{cls.__name__} must implement mask, or prune")
    if not {"sparse", "dense"} <= set(cls.phases):
        raise ValueError(f"{cls.__name__}.phases={cls.phases!r}: must have 'sparse' and 'dense' among them")
    settings, name = cls.Settings, f"{cls.__name__}.Settings"
    if not issubclass(settings, MethodSettings) or "__dataclass_params__" not in vars(settings):  # not inherited ones
        raise ValueError(f"{name}: derive it from MethodSettings, below @dataclass(frozen=True, kw_only=True)")
    for field in dataclasses.fields(settings):
        if "check" not in field.metadata:
            raise ValueError(f"{name}.{field.name}: make it by setting(default, check, text)")
        if field.name in RESERVED:
            raise ValueError(f"{name}.{field.name}: a config has a field of that name already")


def method_class(name: object) -> type[SparseMethod]:
    """The method registered by `name`; ValueError if there is none."""
    if not isinstance(name, str) or name not in METHODS:
        way = "import the module that registers your own method (commands: --import MODULE)"
        raise ValueError(f"method={shown(name)}: must be one of {sorted(METHODS)}; {way}")
    return METHODS[name]


def describe_settings(method: str) -> dict[str, str]:
    """The meaning and default of each setting of a method: the keywords that `Sparse24Config(method=...)` takes.

    Args:
        method: the name of a registered method.

    Returns:
        The meanings by name.

    Raises:
        ValueError: no method is registered by that name.

    Examples:
        >>> describe_settings("sr-ste")["masked_decay"]
        "lambda_W >= 0, the pull of pruned weights towards zero, ... (default 0.0002)"
    """
    fields = dataclasses.fields(method_class(method).Settings)
    return {field.name: f"{field.metadata['text']} (default {field.default!r})" for field in fields}
