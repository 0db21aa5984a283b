"""What the library says: progress of long work, as a bar where somebody can see one, a line a minute elsewhere, and one
line at the end; and logs, of the main process alone.

The bars are Transformers', so `transformers.utils.logging.disable_progress_bar()` turns them off.
"""

import sys
import time
from collections.abc import Callable
from logging import Logger, LogRecord
from types import TracebackType
from typing import Any, cast

from tqdm.auto import tqdm
from transformers.utils import logging

from .weights.sharding import rank

SECONDS_BETWEEN_LINES = 60


class Progress:
    """A context manager around work of `total` units. The main process alone shows or says anything.

    Args:
        what: is done, such as `"calibration"`.
        total: number of units; None where it is set later.
        unit: what is counted, in the singular.
        say: takes a line every minute where there is no bar, and one at the end of work that was not interrupted: what,
            how much, how long. A logger's `info` in the library, `print` in commands; None says nothing.
        leave: whether the bar stays when it is done.
        hide: show no bar, whoever watches.

    Attributes:
        done: units so far.
    """

    def __init__(
        self,
        what: str,
        total: int | None,
        unit: str,
        say: Callable[[str], object] | None = None,
        *,
        leave: bool = True,
        hide: bool = False,
    ):
        self.what, self.unit, self.done = what, unit, 0
        self.is_shown = not hide and rank() == 0 and is_watched()
        self._say = say if rank() == 0 else None
        self._bar: Any = logging.tqdm(total=total, desc=what, unit=unit, leave=leave, disable=not self.is_shown)
        self._total = total
        self._start = self._said = time.monotonic()

    @property
    def total(self) -> int | None:
        """Number of units."""
        return self._total

    @total.setter
    def total(self, total: int) -> None:
        self._total = self._bar.total = total

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self._start

    def update(self, number: int = 1, note: str | None = None) -> None:
        """Count units as done.

        Args:
            number: of units; 0 changes the note alone.
            note: stands behind the bar until the next one.
        """
        self.done += number
        if note is not None:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(number)
        if self._say is not None and not self.is_shown and time.monotonic() >= self._said + SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            self._say(self._line(note))

    def summary(self) -> str:
        """What was done, how much, and how long it took."""
        return f"{self.what}: {count(self.done, self.unit)} in {duration(self.seconds)}"

    def close(self) -> None:
        """End the bar, and say the summary; `with` does it where no exception ends the work."""
        self._bar.close()
        if self._say is not None:
            self._say(self.summary())

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._bar.close()

    def _line(self, note: str | None) -> str:
        parts = [f"{self.what}: {self.done}", duration(self.seconds)]
        if self._total:
            left = (self._total - self.done) * self.seconds / self.done if self.done else None
            parts = [f"{self.what}: {self.done} of {count(self._total, self.unit)}", f"{duration(self.seconds)} so far"]
            parts += [] if left is None else [f"about {duration(left)} left"]
        return ", ".join([*parts, *([note] if note else [])])


def get_logger(name: str) -> Logger:
    """A logger as Transformers makes them, which is silent in all processes but the first: all of them find the same.

    Args:
        name: of the module.

    Returns:
        The logger.
    """
    logger = cast(Logger, logging.get_logger(name))
    logger.addFilter(_is_main_process)
    return logger


def _is_main_process(record: LogRecord) -> bool:
    return rank() == 0


def is_watched() -> bool:
    """Whether a bar can be seen: in a notebook, or where stderr is a terminal. A log would get a line per change."""
    in_notebook = any(cls.__name__ == "tqdm_notebook" for cls in tqdm.__mro__)
    return in_notebook or (sys.stderr is not None and sys.stderr.isatty())


def count(number: int, unit: str) -> str:
    """A number of things, in words.

    Args:
        number: of them.
        unit: in the singular.

    Returns:
        Such as `"1 batch"` or `"12 batches"`.
    """
    plural = unit if number == 1 else f"{unit}es" if unit.endswith(("ch", "s", "x")) else f"{unit}s"
    return f"{number:,} {plural}"


def duration(seconds: float) -> str:
    """A time in the unit that fits it.

    Args:
        seconds: the time.

    Returns:
        Such as `"3.2 s"`, `"5 min"` or `"2.5 h"`.
    """
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
