"""Packages that only some recipes need."""

import importlib
from types import ModuleType


class MissingPackage(ImportError):
    """A package that a recipe needs; the text has the command that installs it."""


def require(name: str, extra: str) -> ModuleType:
    """Import a package that an `extra` of `setup.cfg` lists. MissingPackage: it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise  # it is installed, and lacks something itself
        raise MissingPackage(
            f"this recipe needs {name}: pip install -c constraints.txt -e '.[{extra}]' in the root of the repository",
            name=name,
        ) from error
