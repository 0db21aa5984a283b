"""Every kernel compiles for Hopper, on a machine without a GPU."""

import subprocess
import sys
from pathlib import Path

from recipes.benchmarks import operations
from recipes.benchmarks.variants import environment


def test_every_kernel_compiles_for_hopper():
    here = Path(__file__).parent
    compiled = {name: value for name, value in environment().items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(here / "compiled_for_hopper.py")]
    printed = subprocess.run(command, env=compiled, check=True, capture_output=True, text=True).stdout
    results = {name: (int(count), verdict) for name, count, verdict in (x.split(" ", 2) for x in printed.splitlines())}
    assert set(results) == {workload.function for workload in operations.workloads()}
    assert {name: found for name, found in results.items() if found[1] != "ok" or not found[0]} == {}
