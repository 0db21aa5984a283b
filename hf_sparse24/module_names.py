"""Matches `target_modules` and `exclude_modules` with layers: a group, names, or a regular expression.

A string is a group; or a name of letters, digits, `_` and `-`, joined by dots; or else a regular expression, which must
match a layer's whole name. A downloaded `config.json` may hold one on which `re` backtracks without end, so `regex`,
which Transformers depends on, matches them with a timeout.
"""

import math
import re
import time
import warnings
from collections.abc import Sequence
from typing import Any

import regex

from .tables import shown

TARGET_GROUPS = ("mlp", "attention", "all-linear")

MATCH_SECONDS = 5.0  # to match one expression with all names of a model; ordinary ones take milliseconds
_MAX_SIZE = 100_000  # of an expression's characters, with `{n}` expanded: `regex` takes about 300 bytes for each
_NAME = re.compile(r"[\w-]+(\.[\w-]+)*")


class ModuleNames:
    """A value of `target_modules` or `exclude_modules`, to be matched with the layers of one model.

    ValueError: it is no group, no name, no regular expression, and no non-empty list of names.
    """

    def __init__(self, field: str, value: Any):
        names = value if isinstance(value, list) else [value]
        if not names or not all(isinstance(name, str) and name for name in names):
            ways = "a name's end, a regular expression, or a non-empty list of name endings"
            raise ValueError(f"{field}={shown(value)}: must be one of {list(TARGET_GROUPS)}, {ways}")
        self.field, self.value = field, value
        self.group = value if value in TARGET_GROUPS else None
        is_listed = isinstance(value, list) or _NAME.fullmatch(value) is not None
        self.endings: list[str] = names if is_listed and self.group is None else []
        self._expression: Any = None if is_listed else _compile(field, value)
        self._seconds_left = MATCH_SECONDS

    def picks(self, names: Sequence[str], sublayer: str | None) -> bool:
        """Return whether the value picks a layer with these `names`, in a sublayer `"mlp"`, `"attention"` or None."""
        if self.group is not None:
            return self.group in ("all-linear", sublayer)
        if self._expression is None:
            return any(ends_with(name, ending) for name in names for ending in self.endings)
        return any(self._matches(name) for name in names)

    def _matches(self, name: str) -> bool:
        started = time.monotonic()
        try:
            found = self._expression.fullmatch(name, timeout=max(self._seconds_left, 1e-3))
        except TimeoutError as error:
            raise ValueError(
                f"{self.field}={shown(self.value)}: matching this regular expression takes more than "
                f"{MATCH_SECONDS:g} s; write it without repetitions inside of repetitions, or list names"
            ) from error
        self._seconds_left -= time.monotonic() - started
        return found is not None


def ends_with(name: str, ending: str) -> bool:
    """Return whether `ending` is the whole name or its last components."""
    return name == ending or name.endswith(f".{ending}")


def _compile(field: str, value: str) -> Any:
    """Return the compiled expression, if `re` takes it too: the timeout of `regex` does not cover its recursion."""
    counts = [int(count) for count in re.findall(r"\{([0-9]{1,9})", value)]
    size = len(value) * math.prod(max(count, 1) for count in counts)
    if size > _MAX_SIZE or re.search(r"\(\?[a-zA-Z]*x", value):  # (?x) would hide counts from the line above
        raise ValueError(
            f"{field}={shown(value)}: a regular expression of more than {_MAX_SIZE} characters, with {{n}} written "
            f"out, or with the flag x; write a simpler one, or list names"
        )
    try:
        with warnings.catch_warnings(action="ignore"):  # `re` announces another meaning of "[["; `regex` keeps this one
            re.compile(value)
            return regex.compile(value)
    except Exception as error:  # besides re.error, OverflowError and RecursionError
        raise ValueError(f"{field}={shown(value)}: not a valid regular expression ({error})") from error
