"""A few of the kills of `kill.py`; run that by hand for more."""

import re
import subprocess
import sys

import pytest
from paths import SUPPORT


@pytest.mark.slow
def test_kills_in_training_lose_nothing():
    command = [sys.executable, str(SUPPORT / "kill.py"), "20"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert re.search(r"training: 20 kills, .* no saved step lost, (\d+) of \1 runs ended bit-eq", run.stdout)
