"""The kernels for CPUs read and write nothing but their operands, whatever numbers and masks these have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import SUPPORT
from sparse24_kernels.cpu import build
from sparse24_kernels.cpu.library import load

SCRIPT = SUPPORT / "fuzz_cpu_kernels.py"


@pytest.mark.slow
def test_operands_before_protected_pages():
    library = load()
    if isinstance(library, str):
        pytest.skip(library)
    run = [sys.executable, SCRIPT, library.functions._name, "0", "2000"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(path in done.stdout for path in library.paths)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sanitizers", "runtime", "calls"),
    [
        ("address,undefined", "libasan.so", "3000"),
        ("thread", "libtsan.so", "500"),
    ],
)
def test_sanitizers(sanitizers, runtime, calls, tmp_path):
    try:
        command = [*build.compiler(), f"-print-file-name={runtime}"]
    except build.BuildError as error:
        pytest.skip(str(error))
    found = Path(subprocess.run(command, capture_output=True, text=True).stdout.strip())
    if not found.is_absolute():
        pytest.skip(f"this compiler has no {runtime}")
    build.build(tmp_path / "library.so", ("-O1", "-g1", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"))
    environment = os.environ | {
        "LD_PRELOAD": str(found),
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "exitcode=66",
    }
    run = [sys.executable, SCRIPT, tmp_path / "library.so", "1", calls]
    done = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
