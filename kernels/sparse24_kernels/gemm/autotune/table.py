"""What was measured, on disk and in memory: times, and algorithms that failed and are never run again.

One JSON file per environment in the user's cache, because the meaning of an algorithm id, and its speed, depend on the
device and on the versions of torch and cuSPARSELt. A file that cannot be read counts as empty, with one warning; it is
never an error.
"""

import contextlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Hashable, Iterator
from pathlib import Path

from ..problem import Algorithm, GemmProblem
from .records import (
    SEGMENT_K,
    SEGMENT_K_FROM,
    Entries,
    Environment,
    Failure,
    Measured,
    bucket,
    bucket_start,
    dump_table,
    parse_table,
)

try:
    import fcntl
except ImportError:  # not POSIX: files are still replaced as a whole, but two processes that save may lose an entry
    fcntl = None  # type: ignore[assignment]

LOCK_SECONDS = 10

_warned: set[Path] = set()


class Table:
    """Everything known in one environment, including what this process has added."""

    def __init__(self, environment: Environment):
        self.environment = environment
        entries, failures = _read(user_directory() / environment.file_name(), environment)
        self.entries: Entries = entries
        self.failures: dict[tuple[Hashable, ...], Failure] = {failure.key: failure for failure in failures}
        self._added: list[tuple[GemmProblem, tuple[Measured, ...]]] = []
        self._failed: list[Failure] = []

    def add(self, problem: GemmProblem, candidates: tuple[Measured, ...]) -> None:
        self.entries[problem] = candidates
        self._added.append((problem, candidates))

    def fail(self, problem: GemmProblem, algorithm: Algorithm, reason: str) -> None:
        failure = Failure(problem, algorithm, reason)
        self.failures[failure.key] = failure
        self._failed.append(failure)

    def in_bucket_of(self, problem: GemmProblem) -> Entries:
        """What was measured in the bucket of a problem, the largest n first."""
        alike = problem._replace(n=bucket(problem.n))
        found = [key for key in self.entries if key._replace(n=bucket(key.n)) == alike]
        return {key: self.entries[key] for key in sorted(found, key=lambda key: -key.n)}

    def unusable(self, problem: GemmProblem, algorithm: Algorithm) -> str | None:
        """Why an algorithm is neither tried nor used for a problem and its bucket, or None where it may be."""
        if algorithm.split_k == SEGMENT_K and bucket_start(problem.n) < SEGMENT_K_FROM:
            return f"segment-k may hang below n = {SEGMENT_K_FROM}"
        failure = self.failures.get(Failure(problem, algorithm, "").key)
        return None if failure is None else failure.reason

    def save(self) -> None:
        """Add what this process measured to the user's file, keeping what other processes wrote in the meantime."""
        path = user_directory() / self.environment.file_name()
        if not self._added and not self._failed:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _lock(path.with_suffix(".lock")):
                entries, failures = _read(path, self.environment)
                entries |= dict(self._added)
                by_key = {failure.key: failure for failure in [*failures, *self._failed]}
                _replace(path, dump_table(self.environment, entries, list(by_key.values())))
        except OSError as error:
            _warn_once(path, f"cannot be written ({error}): the measurements are lost when this process ends")


def user_directory() -> Path:
    """`$SPARSE24_CACHE`, or `sparse24` in `$XDG_CACHE_HOME`, or `~/.cache/sparse24`."""
    if own := os.environ.get("SPARSE24_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "sparse24"


def forget_warnings() -> None:
    _warned.clear()


def _read(path: Path, environment: Environment) -> tuple[Entries, list[Failure]]:
    """A file's entries and failures: none where there is no file or, with a warning, where it cannot be parsed."""
    try:
        return parse_table(json.loads(path.read_text(encoding="utf-8")), environment)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        _warn_once(path, f"is ignored: {str(error)[:200]}")
    return {}, []


def _warn_once(path: Path, what: str) -> None:
    if path not in _warned:
        _warned.add(path)
        warnings.warn(f"sparse24 autotune: {path} {what}", stacklevel=2)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Exclude other processes that save. Where files cannot be locked, or the lock stays taken, continue without it."""
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
    """Write a file completely or not at all, so no reader sees half of it, even after a crash."""
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
