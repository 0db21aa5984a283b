"""What was measured, on disk and in memory: times, and algorithms that failed and are never run again.

One JSON file per environment in the user's cache, because the meaning of an algorithm id, and its speed, depend on the
device and on the versions of torch and cuSPARSELt. A file that cannot be read, or has another format, counts as absent:
one warning says so, and the next save replaces it.
"""

import json
import math
import os
import tempfile
import warnings
from collections import Counter
from pathlib import Path

from ..problem import Algorithm, GemmProblem
from .records import (
    SEGMENT_K,
    SEGMENT_K_FROM,
    Environment,
    Measured,
    bucket,
    bucket_start,
    parse_problem,
    problem_record,
)

FORMAT = 3

Entries = dict[GemmProblem, tuple[Measured, ...]]
"""For each problem the algorithms of its final round, the fastest first."""

Failures = dict[tuple[GemmProblem, Algorithm], str]
"""Why an algorithm hung, crashed or gave wrong numbers; n of the problem is that of the bucket.

A failure excludes the algorithm from that bucket, and from no other size: all of them are checked by themselves, and a
time-out on a busy machine, or a wrong result of one odd size, would else cost every other size its best.
"""

_warned: set[str] = set()


class Table:
    """Everything known in one environment, including what this process has added."""

    def __init__(self, environment: Environment):
        self.environment = environment
        self.entries, self.failures = self._read()
        self._added: Entries = {}
        self._failed: Failures = {}

    def add(self, problem: GemmProblem, candidates: tuple[Measured, ...]) -> None:
        self.entries[problem] = self._added[problem] = candidates

    def fail(self, problem: GemmProblem, algorithm: Algorithm, reason: str) -> None:
        key = _in_bucket(problem), algorithm
        self.failures[key] = self._failed[key] = reason

    def in_bucket_of(self, problem: GemmProblem) -> Entries:
        """What was measured in the bucket of a problem, the largest n first."""
        found = [key for key in self.entries if _in_bucket(key) == _in_bucket(problem)]
        return {key: self.entries[key] for key in sorted(found, key=lambda key: -key.n)}

    def winners(self, problem: GemmProblem) -> list[int]:
        """Ids that were fastest for other problems of this dtype and layout, the most frequent first."""
        alike = [found[0].algorithm.id for key, found in self.entries.items() if found and key[3:] == problem[3:]]
        return [number for number, _ in Counter(alike).most_common()]

    def unusable(self, problem: GemmProblem, algorithm: Algorithm) -> str | None:
        """Why an algorithm is neither tried nor used for a problem and its bucket, or None where it may be."""
        if algorithm.split_k == SEGMENT_K and bucket_start(problem.n) < SEGMENT_K_FROM:
            return f"segment-k may hang below n = {SEGMENT_K_FROM}"
        return self.failures.get((_in_bucket(problem), algorithm))

    def save(self) -> None:
        """Add what this process measured to the user's file, beside what others have saved there meanwhile."""
        if not self._added and not self._failed:
            return
        entries, failures = self._read()
        text = _dump(self.environment, entries | self._added, failures | self._failed)
        try:
            path = user_directory() / self.environment.file_name()
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, text)
        except OSError as error:
            _warn_once(f"measurements cannot be saved ({error}): they are lost when this process ends")

    def _read(self) -> tuple[Entries, Failures]:
        """What the user's file holds: nothing where there is none, or, with a warning, where it cannot be read."""
        try:
            path = user_directory() / self.environment.file_name()
            return _parse(path.read_text(), self.environment) if path.exists() else ({}, {})
        except (ArithmeticError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {str(error)[:200]}"
            _warn_once(f"earlier measurements cannot be read ({what}): all counts as not tuned, and is measured anew")
            return {}, {}


def user_directory() -> Path:
    """`$SPARSE24_CACHE`, or `sparse24` in `$XDG_CACHE_HOME` (where that is absolute), or `~/.cache/sparse24`.

    Raises:
        FileNotFoundError: it is in the home directory, and there is none.
    """
    own, shared = os.environ.get("SPARSE24_CACHE"), Path(os.environ.get("XDG_CACHE_HOME", ""))
    path = Path(own) if own else (shared if shared.is_absolute() else Path("~/.cache")) / "sparse24"
    try:
        return path.expanduser()
    except RuntimeError:  # Python would go on with a directory that is called "~"
        raise FileNotFoundError(f"no home directory for {path}: set SPARSE24_CACHE to a directory") from None


def forget_warnings() -> None:
    _warned.clear()


def _in_bucket(problem: GemmProblem) -> GemmProblem:
    return problem._replace(n=bucket(problem.n))


def _dump(environment: Environment, entries: Entries, failures: Failures) -> str:
    data = {
        "format": FORMAT,
        "environment": environment,
        "entries": [[problem_record(problem), candidates] for problem, candidates in entries.items()],
        "failures": [[problem_record(problem), *found, reason] for (problem, *found), reason in failures.items()],
    }
    return json.dumps(data, indent=1) + "\n"


def _parse(text: str, environment: Environment) -> tuple[Entries, Failures]:
    data = json.loads(text)
    if data["format"] != FORMAT or data["environment"] != list(environment):
        raise ValueError(f"format {data['format']} of {data['environment']}")
    entries = {parse_problem(problem): tuple(map(_parse_measured, found)) for problem, found in data["entries"]}
    failures = {(parse_problem(problem), Algorithm(*found)): str(why) for problem, found, why in data["failures"]}
    return entries, failures


def _parse_measured(record: list) -> Measured:
    algorithm, sparse_us, dense_us = record
    if not all(math.isfinite(us) and us > 0 for us in (sparse_us, dense_us)):
        raise ValueError(f"no times: {sparse_us}, {dense_us}")
    return Measured(Algorithm(*algorithm), sparse_us, dense_us)


def _replace(path: Path, text: str) -> None:
    """Write a file completely or not at all, so no reader sees half of it, even after a crash."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
    try:
        with open(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _warn_once(what: str) -> None:
    if what not in _warned:
        _warned.add(what)
        warnings.warn(f"sparse24 autotune: {what}", stacklevel=2)
