"""The user's cache folder, where measurements and compiled kernels are kept."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$SPARSE24_CACHE`, `$XDG_CACHE_HOME/sparse24` or `~/.cache/sparse24`, which may not exist.

    Raises:
        RuntimeError: it is in the home directory, and there is none.
    """
    own, shared = os.environ.get("SPARSE24_CACHE"), os.environ.get("XDG_CACHE_HOME")
    folder = Path(own) if own else Path(shared or "~/.cache") / "sparse24"
    return folder.expanduser()
