"""Files that are written whole or not at all, JSON that is an object, directories that one process writes to."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

try:
    import fcntl
except ImportError:  # Windows: two processes that write to one directory are not told apart
    fcntl = None  # type: ignore[assignment]  # it stands for a module


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a path to a file that replaces `path`, unless the block raises. OSError: safetensors met a full disk."""
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        os.replace(part, path)
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. ValueError: the file holds none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is cut short or damaged: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} is cut short or damaged: it must hold a JSON object")
    return values


@contextmanager
def locked_directory(directory: Path, message: str) -> Iterator[None]:
    """Lock a directory, until the process ends at most. BlockingIOError with `message` where another has locked it."""
    if fcntl is None:
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(message) from None
        except OSError:
            pass  # some network file systems cannot lock a directory
        yield
    finally:
        os.close(handle)
