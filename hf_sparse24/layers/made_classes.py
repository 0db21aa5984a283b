"""Subclasses of a model's own classes, made when the program runs, that can be copied and pickled."""

from collections.abc import Hashable
from functools import cache
from typing import Any, ClassVar


class Made:
    """The base of what stands in front of a module's own class. pickle finds no made class by name, so an instance is
    pickled by `made_of`, the arguments of `made_class`."""

    prefix: ClassVar[str]
    made_of: ClassVar[tuple[type, type, Any]]

    @classmethod
    def members(cls, key: Any) -> dict[str, Any]:
        """The attributes of the class that is made for `key`."""
        return {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, self.made_of, self.__dict__


@cache
def made_class(front: Any, own: type, key: Hashable) -> Any:
    """The subclass of a module's `own` class with `front` before it; one for each `key`."""
    members = front.members(key) | {"made_of": (front, own, key)}
    return type(f"{front.prefix}{own.__name__}", (front, own), members)


def _empty(front: Any, own: type, key: Hashable) -> Any:
    cls = made_class(front, own, key)
    return cls.__new__(cls)
