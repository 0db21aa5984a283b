"""Every kernel compiles for Hopper, on a machine without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

from recipes.benchmarks import operations
from recipes.benchmarks.variants import environment


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper():
    here = Path(__file__).parent
    compiled = {name: value for name, value in environment().items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(here / "compiled_for_hopper.py")]
    printed = subprocess.run(command, env=compiled, check=True, capture_output=True, text=True).stdout
    results = [line.split(" ", 2) for line in printed.splitlines()]
    assert {name for name, _, _ in results} == {workload.operator for workload in operations.workloads()}
    assert not [result for result in results if result[1] == "0" or result[2] != "ok"]
