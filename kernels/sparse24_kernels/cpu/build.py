"""Compiles the kernels for CPUs into a shared library with plain C functions, for any version of Python and torch.

Imports Python's standard library only, because building a wheel runs it where nothing else is installed.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parent / "native"

FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wno-psabi")

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_AVX512_BF16 = (*_AVX512, "-mavx512vbmi", "-mavx512vbmi2", "-mavx512vnni", "-mavx512bf16")


class Unit(NamedTuple):
    """One source that is compiled with flags of its own."""

    source: str
    flags: tuple[str, ...] = ()


UNITS = {
    "any": (Unit("library.cpp"), Unit("isa.cpp", ("-DISA=portable",))),
    "x86_64": (
        Unit("isa.cpp", ("-DISA=avx2", "-DISA_AVX2=1", *_AVX2)),
        Unit("isa.cpp", ("-DISA=avx512", "-DISA_AVX512=1", *_AVX512)),
        Unit("avx512_bf16.cpp", _AVX512_BF16),
        Unit("amx.cpp", (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16")),
    ),
    "arm64": (Unit("isa.cpp", ("-DISA=neon", "-DISA_NEON=1")),),
}
"""What is compiled on every machine, and what besides on some."""

_MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "arm64", "arm64": "arm64"}


class BuildError(Exception):
    """The kernels cannot be compiled here; the message says why and what to do."""


def units() -> tuple[Unit, ...]:
    """What this machine compiles."""
    return UNITS["any"] + UNITS.get(_MACHINES.get(platform.machine().lower(), ""), ())


def fingerprint() -> str:
    """16 hexadecimal digits that change with the sources and with how they are compiled."""
    digest = hashlib.sha256(repr((FLAGS, units(), sys.platform, platform.machine())).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def compiler() -> str:
    """The C++ compiler: `$CXX`, or the first of c++, g++ and clang++.

    Raises:
        BuildError: there is none.
    """
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if shutil.which(name):
            return name
    raise BuildError("no C++ compiler is installed (c++, g++ or clang++, or the one that $CXX names)")


def build(to: Path, extra: tuple[str, ...] = ()) -> None:
    """Compile the library and put it at `to`, whole or not at all.

    Args:
        to: the file; its folder is made if absent.
        extra: flags for every unit, such as a sanitizer's.

    Raises:
        BuildError: no compiler, or one that does not compile this: GCC 11 and Clang 12 are the oldest that do.
        OSError: the folder cannot be written.
    """
    if sys.platform not in ("linux", "darwin"):
        raise BuildError(f"the kernels compile on Linux and macOS, not on {sys.platform}")
    command = [compiler(), *FLAGS, *extra]
    to.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=to.parent, prefix=".build-") as folder,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        objects = [Path(folder) / f"{number}.o" for number in range(len(units()))]
        jobs = [
            [*command, *unit.flags, "-c", str(SOURCES / unit.source), "-o", str(made)]
            for unit, made in zip(units(), objects)
        ]
        list(pool.map(_run, jobs))
        library = Path(folder) / "library"
        _run([compiler(), "-shared", *extra, "-o", str(library), *map(str, objects)])
        os.replace(library, to)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        errors = (
            [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no message"]
        )
        raise BuildError(f"{command[0]} does not compile the kernels, GCC 11 or Clang 12 do: {errors[0][:300]}")
