"""written_whole writes a file at once: a reader, or a process that is killed, never sees half of it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a path to write to. When the block ends, that file replaces `path`; where it raises, `path` stays."""
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
