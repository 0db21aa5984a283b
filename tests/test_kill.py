"""A few of the kills of `kill.py`; run that by hand for more."""

import re
import subprocess
import sys
from pathlib import Path


def test_kills_in_training_and_exports_lose_nothing():
    command = [sys.executable, str(Path(__file__).with_name("kill.py")), "3", "5"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert re.search(r"training: 3 kills, .* no saved step lost, (\d+) of \1 runs ended bit-equal", run.stdout)
    assert len(re.findall(r"exports: 5 kills, .* none a mix", run.stdout)) == 2
