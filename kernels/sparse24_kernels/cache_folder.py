"""The user's cache folder, where measurements and compiled kernels are kept; what forgets plans when these change."""

import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ON_CHANGE: list[Callable[[], None]] = []
"""Functions that forget plans, to call when tuning, or a new backend, has changed how GEMMs run."""


def cache_folder() -> Path:
    """`$SPARSE24_CACHE`, `$XDG_CACHE_HOME/sparse24` or `~/.cache/sparse24`, which may not exist. RuntimeError: it is in
    the home directory, and there is none."""
    own, shared = os.environ.get("SPARSE24_CACHE"), os.environ.get("XDG_CACHE_HOME")
    folder = Path(own) if own else Path(shared or "~/.cache") / "sparse24"
    return folder.expanduser()


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Keep other processes out of a block of the same path, whose folder is made if absent. OSError: its lock file
    cannot be written, or is a symbolic link. ImportError: on Windows."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path.with_name(f".{path.name}.lock"), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: a process that was forked meanwhile has it open
        os.close(lock)


def write_json(path: Path, content: object) -> None:
    """Replace a file completely or not at all, so that no reader sees half of it; its folder is made if absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{uuid.uuid4().hex}")  # others may read it, unlike a file of `tempfile`
    try:
        new.write_text(json.dumps(content, indent=1))
        new.replace(path)
    except BaseException:  # a full disk, Ctrl-C
        new.unlink(missing_ok=True)
        raise
