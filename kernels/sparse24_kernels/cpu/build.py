"""Compiles the kernels for CPUs into a shared library with plain C functions, for any version of Python and torch.

Imports Python's standard library only, because building a wheel runs it where nothing else is installed.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "native"

FLAGS = [
    *("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-Wno-psabi"),
    # With a `-march=native` in $CXX, older machines that share the cache folder would meet unknown instructions.
    *(["-march=x86-64"] if platform.machine() == "x86_64" else []),
]

LINK = {"linux": ("-Wl,--as-needed",)}
"""Flags of the linker by platform: with these the library needs libc alone, none of the compiler's own libraries."""

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_AVX512_BF16 = (*_AVX512, "-mavx512vbmi", "-mavx512vbmi2", "-mavx512vnni", "-mavx512bf16")

# The reference rounds every product. That no operation traps lets compilers make vectors of conditions.
_EXACT = ("-ffp-contract=off", "-fno-trapping-math")

UNITS: dict[str, tuple[tuple[str, ...], ...]] = {
    "any": (("library.cpp",), ("isa.cpp", "-DISA=portable"), ("prune.cpp", "-DISA=portable", *_EXACT)),
    "x86_64": (
        ("isa.cpp", "-DISA=avx2", "-DISA_AVX2=1", *_AVX2),
        ("isa.cpp", "-DISA=avx512", "-DISA_AVX512=1", *_AVX512),
        ("prune.cpp", "-DISA=avx2", *_AVX2, *_EXACT),
        ("prune.cpp", "-DISA=avx512", *_AVX512, *_EXACT),
        ("avx512_bf16.cpp", *_AVX512_BF16),
        ("amx.cpp", *_AVX512_BF16, "-mamx-tile", "-mamx-bf16"),
    ),
    "arm64": (("isa.cpp", "-DISA=neon", "-DISA_NEON=1"), ("prune.cpp", "-DISA=neon", *_EXACT)),
}
"""Sources and their flags: what is compiled on every machine, and what besides on some."""

_MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "arm64", "arm64": "arm64"}


class BuildError(Exception):
    """The kernels cannot be compiled here; the message says why and what to do."""


def units() -> tuple[tuple[str, ...], ...]:
    """Sources and flags that this machine compiles."""
    return UNITS["any"] + UNITS.get(_MACHINES.get(platform.machine().lower(), ""), ())


def fingerprint() -> str:
    """16 hexadecimal digits that change with the sources and with how they are compiled."""
    digest = hashlib.sha256(repr((FLAGS, LINK, units(), sys.platform, platform.machine())).encode())
    for source in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def compiler() -> list[str]:
    """The C++ compiler: `$CXX`, which may have arguments, or the first of c++, g++ and clang++. BuildError: none."""
    if sys.platform not in ("linux", "darwin"):
        raise BuildError(f"they compile on Linux and macOS, not on {sys.platform}")
    own = shlex.split(os.environ.get("CXX", ""))
    for command in [own] if own else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    if own:
        raise BuildError(f"CXX={os.environ['CXX']!r} is not installed")
    raise BuildError("no C++ compiler is installed: install g++ or clang++, or name one in $CXX")


def build(to: Path, extra: tuple[str, ...] = ()) -> None:
    """Compile the library and put it at `to`, whole or not at all; `extra` are flags for every unit.

    BuildError: no compiler, or one older than GCC 11 or Clang 12. OSError: the folder cannot be written, or is full.
    """
    command = [*compiler(), *FLAGS, *extra]
    to.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=to.parent, prefix=".build-") as folder,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        objects = [Path(folder) / f"{number}.o" for number in range(len(units()))]
        jobs = [
            [*command, *flags, "-c", str(SOURCES / source), "-o", str(made)]
            for (source, *flags), made in zip(units(), objects)
        ]
        list(pool.map(_run, jobs))
        library = Path(folder) / "library"
        _run([*compiler(), "-shared", *extra, *LINK.get(sys.platform, ()), *map(str, objects), "-o", str(library)])
        os.replace(library, to)


def _run(command: list[str]) -> None:
    environment = os.environ | {"TMPDIR": os.path.dirname(command[-1]), "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment)
    if done.returncode:
        lines = done.stderr.splitlines() or ["no message"]
        first = next((line for line in lines if "error" in line), lines[0])
        raise BuildError(f"{command[0]} does not compile them, GCC 11 or Clang 12 do: {first[:300]}")
