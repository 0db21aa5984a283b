"""What the tuner knows, on disk and in memory: measurements, and algorithms that are never to be run.

One JSON file per environment, since what an algorithm id means, and how fast it is, belongs to one device and one
version of two libraries. Two folders are read, `tables/` beside this file and then the user's cache, which overrides
it; only the latter is written. A file that cannot be read is a cache miss and one warning, never an error.
"""

import contextlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..cusparselt import Algorithm, Problem
from .records import (
    SEGMENT_K,
    SEGMENT_K_FROM,
    Environment,
    Failure,
    Measured,
    Rule,
    bucket,
    bucket_start,
    dump_table,
    parse_rules,
    parse_table,
)

try:
    import fcntl
except ImportError:  # not a POSIX system: files are still replaced whole, but two savers at once may cost an entry
    fcntl = None

SHIPPED = Path(__file__).parent / "tables"
LOCK_SECONDS = 10

_warned: set[Path] = set()


class Table:
    """Everything known in one environment, and what this process has added to it."""

    def __init__(self, environment: Environment):
        self.environment = environment
        self.entries: dict[Problem, tuple[Measured, ...]] = {}
        self.failures: dict[tuple, Failure] = {}
        self.rules: list[Rule] = []
        self._added: list[tuple[Problem, tuple[Measured, ...]]] = []
        self._failed: list[Failure] = []
        for folder in (SHIPPED, user_directory()):
            entries, failures = _read(folder / environment.file_name(), parse_table, environment) or ({}, [])
            self.entries |= entries
            self.failures |= {failure.key: failure for failure in failures}
            self.rules += _read(folder / "deny.json", parse_rules) or []

    def add(self, problem: Problem, candidates: tuple[Measured, ...]) -> None:
        self.entries[problem] = candidates
        self._added.append((problem, candidates))

    def fail(self, problem: Problem, algorithm: Algorithm, why: str) -> None:
        failure = Failure(problem, algorithm, why)
        self.failures[failure.key] = failure
        self._failed.append(failure)

    def in_bucket_of(self, problem: Problem) -> dict[Problem, tuple[Measured, ...]]:
        """What was measured within a bucket, the largest n first."""
        alike = problem._replace(n=bucket(problem.n))
        found = [key for key in self.entries if key._replace(n=bucket(key.n)) == alike]
        return {key: self.entries[key] for key in sorted(found, key=lambda key: -key.n)}

    def why_denied(self, problem: Problem, algorithm: Algorithm) -> str | None:
        """Why an algorithm is neither tried nor used for a problem and its bucket, or None."""
        if algorithm.split_k == SEGMENT_K and bucket_start(problem.n) < SEGMENT_K_FROM:
            return f"segment-k may hang below n = {SEGMENT_K_FROM}"
        failure = self.failures.get(Failure(problem, algorithm, "").key)
        if failure is not None:
            return failure.why
        return next((rule.reason for rule in self.rules if rule.matches(self.environment, algorithm)), None)

    def save(self) -> None:
        """Add what this process has found to the user's file, keeping what others have written to it meanwhile."""
        path = user_directory() / self.environment.file_name()
        if not self._added and not self._failed:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _lock(path.with_suffix(".lock")):
                entries, failures = _read(path, parse_table, self.environment) or ({}, [])
                entries |= dict(self._added)
                by_key = {failure.key: failure for failure in [*failures, *self._failed]}
                _replace(path, dump_table(self.environment, entries, list(by_key.values())))
        except OSError as error:
            _warn_once(path, f"cannot be written ({error}): what was tuned is lost when this process ends")


def user_directory() -> Path:
    """`$SPARSE24_CACHE`, or `sparse24` in `$XDG_CACHE_HOME`, or `~/.cache/sparse24`."""
    if own := os.environ.get("SPARSE24_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "sparse24"


def forget_warnings() -> None:
    _warned.clear()


def _read(path: Path, parse: Callable[..., Any], *arguments: Any) -> Any:
    """What `parse` makes of a file; None where there is none, or, with a warning, where it is of no use."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")), *arguments)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        _warn_once(path, f"is ignored: {str(error)[:200]}")
        return None


def _warn_once(path: Path, what: str) -> None:
    if path not in _warned:
        _warned.add(path)
        warnings.warn(f"sparse24 tuner: {path} {what}", stacklevel=2)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Keep other savers out; where files cannot be locked, or another holds on to the lock, go on without."""
    if fcntl is None:
        yield
        return
    with open(path, "w") as file:
        deadline = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:
                break
        yield


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all: a reader, or a crash, never sees half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
