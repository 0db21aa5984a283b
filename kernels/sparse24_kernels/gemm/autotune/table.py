"""What was measured, on disk and in memory: times, and algorithms that failed and are never run again.

One JSON file per environment in the user's cache, because the meaning of an algorithm id, and its speed, depend on the
device and on the versions of torch and cuSPARSELt. What cannot be read is never an error and never erased: one warning
says so, records stay in the file as they are, and a file that is no table of ours is kept aside under another name.
Failures are searched for in any text.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Hashable, Iterator
from pathlib import Path

from ..problem import Algorithm, GemmProblem
from .records import (
    NOTHING,
    SEGMENT_K,
    SEGMENT_K_FROM,
    Contents,
    Entries,
    Environment,
    Failure,
    Measured,
    bucket,
    bucket_start,
    dump_table,
    parse_table,
    salvage_table,
)

try:
    import fcntl
except ImportError:  # not POSIX: files are still replaced as a whole, but two processes that save may lose an entry
    fcntl = None  # type: ignore[assignment]

LOCK_SECONDS = 10

_warned: set[str] = set()


class Table:
    """Everything known in one environment, including what this process has added."""

    def __init__(self, environment: Environment):
        self.environment = environment
        contents = NOTHING
        try:
            contents, _ = _read(user_directory() / environment.file_name(), environment)
        except OSError as error:
            _warn_once(f"the file of earlier measurements cannot be read ({error}): all counts as not tuned")
        self.entries: Entries = contents.entries.copy()
        self.failures: dict[tuple[Hashable, ...], Failure] = {failure.key: failure for failure in contents.failures}
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

    def winners(self, problem: GemmProblem) -> list[int]:
        """Ids that were fastest for other problems of this dtype and layout, the most frequent first."""
        alike = [found[0].algorithm.id for key, found in self.entries.items() if found and key[3:] == problem[3:]]
        return [number for number, _ in Counter(alike).most_common()]

    def unusable(self, problem: GemmProblem, algorithm: Algorithm) -> str | None:
        """Why an algorithm is neither tried nor used for a problem and its bucket, or None where it may be."""
        if algorithm.split_k == SEGMENT_K and bucket_start(problem.n) < SEGMENT_K_FROM:
            return f"segment-k may hang below n = {SEGMENT_K_FROM}"
        failure = self.failures.get(Failure(problem, algorithm, "").key)
        return None if failure is None else failure.reason

    def save(self) -> None:
        """Add what this process measured to the user's file, keeping all else that is in it."""
        if not self._added and not self._failed:
            return
        try:
            path = user_directory() / self.environment.file_name()
            path.parent.mkdir(parents=True, exist_ok=True)
            with _lock(path.with_suffix(".lock")):
                contents, raw = _read(path, self.environment)
                if contents.lost:
                    _replace(_aside(path, raw), raw)
                _replace(path, dump_table(self.environment, contents, dict(self._added), self._failed).encode())
        except OSError as error:
            _warn_once(f"measurements cannot be saved ({error}): they are lost when this process ends")


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


def _read(path: Path, environment: Environment) -> tuple[Contents, bytes]:
    """What a file holds, and its bytes; nothing where there is no file. Warns of what cannot be read.

    Raises:
        OSError: there is a file, and the system does not let us read it.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return NOTHING, b""
    try:
        contents = parse_table(json.loads(raw), environment)
        dump_table(environment, contents, {}, [])  # raises where records are nested too deeply to be written again
    except (ValueError, RecursionError) as error:
        contents = salvage_table(raw.decode(errors="replace"), f"{type(error).__name__}: {error}")
    if contents.lost:
        but = f", apart from {len(contents.failures)} failed algorithms" if contents.failures else ""
        aside = f"it is kept as {_aside(path, raw).name} when measurements are saved"
        _warn_once(f"{path} is not read{but}: {contents.lost[:200]}; {aside}")
    elif contents.unread:
        count, first = len(contents.unread), contents.unread[0][:200]
        _warn_once(f"{path}: records that cannot be read are left as they are, {count} of them; the first: {first}")
    return contents, raw


def _aside(path: Path, raw: bytes) -> Path:
    """Where a file is kept that is replaced: the same for the same contents, so that none replaces another."""
    return path.with_suffix(f".unreadable-{hashlib.sha256(raw).hexdigest()[:8]}")


def _warn_once(what: str) -> None:
    if what not in _warned:
        _warned.add(what)
        warnings.warn(f"sparse24 autotune: {what}", stacklevel=2)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Exclude other processes that save. Where that fails, continue without it, with a warning."""
    if fcntl is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            # Neither through a link nor truncated: in a directory that others may write, it could be any file.
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            stack.callback(os.close, handle)
            deadline = time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)
        except OSError as error:
            _warn_once(f"{path} cannot be locked ({error}): of two processes that save at once, one may lose records")
        yield


def _replace(path: Path, contents: bytes) -> None:
    """Write a file completely or not at all, so no reader sees half of it, even after a crash.

    A link in its place is replaced, not followed; the temporary file is always a new one.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
    try:
        with open(handle, "wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
