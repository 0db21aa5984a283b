"""written_whole writes a file at once: a reader, or a process that is killed, never sees half of it. read_json reads a
JSON object."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a path to write to. When the block ends, that file replaces `path`; where it raises, `path` stays."""
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        os.replace(part, path)
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
