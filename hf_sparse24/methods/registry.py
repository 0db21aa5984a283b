"""The registry of methods: `METHODS`, and `register_method` for one of your own."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from ..messages import shown
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
        ValueError: a name that is taken by another class (running a notebook's cell again is fine), a class that
            lacks both `mask` and `prune`, or one of the phases `"sparse"` and `"dense"`, or settings that are not a
            frozen dataclass derived from `MethodSettings` with every field made by `setting(...)`.

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
    settings: Any = cls.Settings
    parameters = vars(settings).get("__dataclass_params__")  # of this class, not inherited
    if not issubclass(settings, MethodSettings) or parameters is None or not parameters.frozen:
        raise ValueError(
            f"{cls.__name__}.Settings must be a class derived from MethodSettings, below "
            f"@dataclass(frozen=True, kw_only=True)"
        )
    for found in dataclasses.fields(settings):
        if "check" not in found.metadata:
            raise ValueError(f"{cls.__name__}.Settings.{found.name}: make it by setting(default, check, text)")
        if found.name in RESERVED:
            raise ValueError(f"{cls.__name__}.Settings.{found.name}: a config has a field of that name already")


def method_class(name: Any) -> type[SparseMethod]:
    """The method registered by `name`.

    Raises:
        ValueError: none is; with the names that are.
    """
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(
            f"method={shown(name)}: must be one of {sorted(METHODS)}; import the module of a method of your own first, "
            f"so that register_method makes it known"
        )
    return METHODS[name]
