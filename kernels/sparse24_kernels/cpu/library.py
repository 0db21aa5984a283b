"""The compiled kernels of this machine: loaded on first use, or the reason why there are none."""

import ctypes
import hashlib
import logging
import os
import shutil
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..cache_folder import cache_folder, file_lock
from . import build

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The numbers of `Dtype` in native/problem.h."""

SWITCH = "SPARSE24_CPU"
"""The environment variable that chooses a path by its name, or `off`."""

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES = {
    "sparse24_linear": [ctypes.c_int, *[_POINTER] * 6, *[_INT] * 7, _POINTER],
    "sparse24_unpack": [ctypes.c_int, *[_POINTER] * 4, *[_INT] * 4, _POINTER],
    "sparse24_prune": [ctypes.c_int, _INT, *[_POINTER] * 3, *[_INT] * 7, ctypes.c_float, _INT, _INT, _POINTER],
}


class Library:
    """The loaded kernels.

    Attributes:
        file: where they were loaded from. Its name changes with the sources and, where it was compiled here, with its
            content.
        paths: what this CPU runs, the fastest first, by the number that the C functions take.
        path: the name of the one that runs.
        parallel_for: the address of torch's function that runs a task on its threads.
    """

    def __init__(self, file: Path):
        self.file = file
        self.functions = ctypes.CDLL(str(file))
        for name, types in _SIGNATURES.items():
            getattr(self.functions, name).argtypes = types
        self.parallel_for = _torch_parallel_for()
        self.functions.sparse24_path.restype = ctypes.c_char_p
        self.paths: dict[str, int] = {}
        number = 0
        while (name := self.functions.sparse24_path(number)) is not None:
            self.paths |= {name.decode(): number} if name else {}
            number += 1
        self.path = next(iter(self.paths))

    def call(self, function: str, *arguments: Any) -> None:
        """Call a C function with the path before its arguments, and the thread pool behind them."""
        if getattr(self.functions, function)(self.paths[self.path], *arguments, self.parallel_for):
            raise MemoryError(f"{function}: no memory")


@cache
def load() -> Library | str:
    """The kernels, or in words why there are none. They come with the wheel, or are compiled once."""
    switch = os.environ.get(SWITCH)
    if switch == "off":
        return f"{SWITCH}=off"
    try:
        library = _find()
        if switch and switch not in library.paths:
            raise ValueError(f"path={switch!r}: this CPU runs {list(library.paths)}")
        library.path = switch or library.path
        return library
    except (build.BuildError, ValueError) as error:
        return f"no kernels for this CPU: {error}"
    except (OSError, RuntimeError) as error:  # of the cache folder
        return f"no kernels for this CPU: {error}; $SPARSE24_CACHE names another folder to keep them in"


def loaded() -> Library:
    """The loaded library. Call it after dispatch chose it."""
    library = load()
    assert isinstance(library, Library)
    return library


def _torch_parallel_for() -> int:
    """The address of torch's thread pool. Another one, such as OpenMP's, would spin against it."""
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu{suffix}"))
    if not hasattr(torch_cpu, "torch_parallel_for"):
        raise build.BuildError(f"torch {torch.__version__} does not share its threads, 2.10 does: pip install -U torch")
    address = ctypes.cast(torch_cpu.torch_parallel_for, ctypes.c_void_p).value
    assert address is not None
    return address


def _find() -> Library:
    name = f"native-{build.fingerprint()}"
    shipped = Path(__file__).parent / f"{name}.so"
    if shipped.exists():
        with suppress(build.BuildError):  # made for a later system than this
            return _opened(shipped)
    folder = cache_folder()
    return _kept(folder, name) or _compiled(folder, name)


def _kept(folder: Path, name: str) -> Library | None:
    """The library that was compiled before. Its name ends with its digest: loading one that is cut off would end the
    process."""
    whole = [file for file in folder.glob(f"{name}-*.so") if file.stem.endswith(_digest(file))]
    return _opened(whole[0]) if whole else None


def _compiled(folder: Path, name: str) -> Library:
    build.compiler()  # before a folder is made for nothing
    with file_lock(folder / "native"):  # one process compiles, the others wait for it
        if (kept := _kept(folder, name)) is not None:
            return kept
        for left in folder.glob(".build-*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        logging.getLogger(__name__).warning("compiling the kernels for this CPU, once: some ten seconds")
        build.build(new := folder / f".{name}.new")
        return _opened(new.replace(folder / f"{name}-{_digest(new)}.so"))


def _opened(file: Path) -> Library:
    try:
        return Library(file)
    except (OSError, AttributeError) as error:
        ways = "delete it to compile it again, or name a folder in $SPARSE24_CACHE that is not mounted noexec"
        raise build.BuildError(f"{file} does not load ({error}): {ways}") from error


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def addresses(*tensors: torch.Tensor | None) -> list[int | None]:
    """Those of the data, for `Library.call`; None for no tensor."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]
