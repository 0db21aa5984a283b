"""Progress of long work, by Transformers' bars in a notebook or a terminal and by log lines elsewhere; and loggers."""

import sys
import time
from collections.abc import Callable
from functools import cache
from logging import Logger
from typing import Any, cast

from tqdm.auto import tqdm
from transformers.utils import logging

from .weights.sharding import rank

SECONDS_BETWEEN_LINES = 30


class Progress:
    """Counts the finished units of long work, within a `with` block. Only the main process shows a bar or writes lines.

    `done` counts units, and `total`, None where it is set later, may change. `say` gets a line every half minute where
    there is no bar, and one at the end unless work failed; None writes none, and the bar goes when the work is done.
    """

    def __init__(self, what: str, total: int | None, unit: str, say: Callable[[str], object] | None = None):
        self.what, self.total, self.unit, self.done = what, total, unit, 0
        self._has_bar = rank() == 0 and is_watched()
        self._say = say if rank() == 0 else None
        is_off, stays = not self._has_bar, say is not None
        self._bar: Any = logging.tqdm(total=total, desc=what, unit=unit, leave=stays, disable=is_off)
        self._start = self._said = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def update(self, number: int = 1, note: str | None = None) -> None:
        """Count `number` more units as done, and show `note` behind the bar until the next note."""
        self.done += number
        self._bar.total = self.total
        if note is not None:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(number)
        if self._say is not None and not self._has_bar and time.monotonic() >= self._said + SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            done = f"{self.done} of {count(self.total, self.unit)}" if self.total else count(self.done, self.unit)
            self._say(f"{self.what}: {done} in {duration(self.seconds)}" + (f", {note}" if note else ""))

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bar.close()
        if kind is None and self._say is not None:
            self._say(f"{self.what}: {count(self.done, self.unit)} in {duration(self.seconds)}")


@cache  # one filter for each
def get_logger(name: str) -> Logger:
    """Return Transformers' logger for a module, silenced in all processes but the main one, which logs the same."""
    logger = cast(Logger, logging.get_logger(name))
    logger.addFilter(lambda _: rank() == 0)
    return logger


def is_watched() -> bool:
    """Return whether a bar can be seen: in a notebook or a terminal. A log file would get a line per change."""
    return any(cls.__name__ == "tqdm_notebook" for cls in tqdm.__mro__) or bool(sys.stderr and sys.stderr.isatty())


def count(number: int, unit: str) -> str:
    """Return a number of things in words, such as `"1 batch"` or `"12 batches"`, for `unit` in the singular."""
    plural = unit if number == 1 else f"{unit}es" if unit.endswith(("ch", "s", "x")) else f"{unit}s"
    return f"{number:,} {plural}"


def duration(seconds: float) -> str:
    """Return a time in the unit that fits it, such as `"3.2 s"`, `"5 min"` or `"2.5 h"`."""
    minutes = f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
    return f"{seconds:.1f} s" if seconds < 100 else minutes
