"""replaced_model replaces the model in a directory, which never holds a mixture of the old model and the new one.

The new files are complete in a folder of ours within the directory, and on the disk, before anything is changed. Then
`config.json` goes, without which nothing loads; the old weights go; the new files come, `config.json` last. A process
that is killed between these renames leaves no model that loads, and the next export replaces what it left.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from re import Pattern

from ..files import locked_directory

STAGING = ".hf_sparse24-export"
CONFIG = "config.json"


@contextmanager
def replaced_model(directory: str | os.PathLike, outdated: Pattern[str]) -> Iterator[Path]:
    """Yield an empty folder to write a model to; when the block ends, these files replace the model in `directory`.

    Files that `outdated` names go where the new model does not have them; others stay. Where the block raises, the old
    model stays, and no directory that was made for the new one. BlockingIOError: another process is writing there.
    """
    root = Path(os.path.realpath(directory))
    is_made = not root.exists()
    root.mkdir(parents=True, exist_ok=True)
    with locked_directory(root, f"another process is exporting into {root}; let one process export"):
        new = root / STAGING
        shutil.rmtree(new, ignore_errors=True)  # what a process that was killed has left
        new.mkdir()
        try:
            yield new
            _switch(root, new, outdated)
        except OSError as error:
            if error.errno and not error.filename:
                error.filename = str(root)  # a full disk does not say which it is
            raise
        finally:
            shutil.rmtree(new)
            if is_made and not any(root.iterdir()):
                root.rmdir()


def _switch(root: Path, new: Path, outdated: Pattern[str]) -> None:
    # What a killed process leaves has a file of weights, by which the next export knows it.
    names = sorted((path.name for path in new.iterdir()), key=lambda x: (x == CONFIG, not x.endswith(".safetensors")))
    for name in names:
        with open(new / name, "rb+") as file:  # to disk before anything goes: power may fail
            os.fsync(file.fileno())
    old = [path.name for path in root.iterdir() if path.name in names or outdated.fullmatch(path.name)]
    for name in sorted(old, key=lambda x: (x != CONFIG, x.endswith(".safetensors"))):
        os.remove(root / name)
    for name in names:
        os.replace(new / name, root / name)
