"""replaced_model replaces the model in a directory, which has the old model or the new one at every instant.

A model is several files, and a directory that is a mount point, or lies in a read-only parent, cannot be replaced as a
whole. One link can. In a folder of ours within the directory,

    1. the caller writes the new files to `new`;
    2. `old` gets the old files by hard links, and `current` becomes a link to `old`;
    3. every name of either model becomes a link to `current/<name>`, and still reads as the old model, or not at all;
    4. `current` becomes a link to `new`: all names read as the new model, from one instant to the next;
    5. every name becomes the file that it leads to, or is removed where it leads nowhere; our folder goes last.

Every change is one call of the file system, so a process that is killed leaves one of the two models, and the next
export does step 5 before it begins. A directory without a model needs no links: `config.json` comes last, and nothing
loads without it. A reader that opens some files before step 4 and some after it sees files of both models: `export.py`
names them so that what one model's config or index names is not there in the other, where that would be a mixture.
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
    OSError: the directory holds a model, and its file system lacks hard or symbolic links.
    """
    root = Path(os.path.realpath(directory))
    is_made = not root.exists()
    root.mkdir(parents=True, exist_ok=True)
    with locked_directory(root, f"another process is exporting into {root}; let one process export"):
        _settle(root)  # what a process that was killed has left
        new = root / STAGING / "new"
        new.mkdir(parents=True)
        try:
            yield new
            _switch(root, outdated)
        except OSError as error:
            if error.errno and not error.filename:
                error.filename = str(root)  # a full disk does not say which it is
            raise
        finally:
            _settle(root)
            if is_made and not any(root.iterdir()):
                root.rmdir()


def _switch(root: Path, outdated: Pattern[str]) -> None:
    staging = root / STAGING
    new = {path.name for path in (staging / "new").iterdir()}
    old = {path.name for path in root.iterdir() if path.name in new or outdated.fullmatch(path.name)}
    for name in new:
        with open(staging / "new" / name, "rb+") as file:  # to disk before names lead to it: power may fail
            os.fsync(file.fileno())
    if CONFIG not in old:
        # What a killed process leaves has a file of weights, by which the next export knows it.
        names = sorted(old | new, key=lambda name: (name == CONFIG, not name.endswith(".safetensors")))
        for name in (name for name in reversed(names) if name in old):
            os.remove(root / name)
        for name in (name for name in names if name in new):
            os.replace(staging / "new" / name, root / name)
        return
    (staging / "old").mkdir()
    try:
        for name in old:
            _keep(root / name, staging / "old" / name)
        _link("old", staging / "current")
    except OSError as error:
        way = "its file system lacks the links to replace it by"
        raise OSError(f"{root} holds a model, and {way} ({error}); export into a new directory") from error
    for name in old | new:
        _link(f"{STAGING}/current/{name}", root / name)
    _link("new", staging / "current")


def _settle(root: Path) -> None:
    """Replace every link into our folder by the file that it leads to, and remove the folder."""
    if not (root / STAGING).exists():
        return
    for path in list(root.iterdir()):
        if path.is_symlink() and os.readlink(path).startswith(STAGING):
            source = root / os.readlink(path)
            if os.path.lexists(source):
                os.replace(source, path)
            else:
                os.remove(path)
    shutil.rmtree(root / STAGING)


def _link(target: str, path: Path) -> None:
    """Make `path` a link to `target`, in one call also where the path exists."""
    root = path.parent if path.parent.name == STAGING else path.parent / STAGING
    temporary = root / "link"
    os.symlink(target, temporary)
    os.replace(temporary, path)


def _keep(path: Path, second: Path) -> None:
    """Give a file a second name."""
    if path.is_symlink():  # such as into the Hub's cache: relative to where it is
        os.symlink(os.path.realpath(path), second)
    else:
        os.link(path, second)
