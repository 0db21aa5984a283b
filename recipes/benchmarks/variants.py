"""Variants of a model, each in a separate process, that answer requests in turn. It imports little."""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Loaded = tuple[Callable[..., dict[str, float]], dict[str, Any]]
"""What answers a request, and facts of what was loaded."""

ANSWER = "answer: "
ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """The environment of a process that can import the repository."""
    paths = (str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH"))
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


class Variant:
    """A process that has loaded a model, and answers. `loaded` is its first answer; `limits` extend its environment."""

    def __init__(self, *command: str, python: str | Path = sys.executable, limits: dict[str, str] | None = None):
        self.command = command
        self.process = subprocess.Popen(
            [python, "-P", "-m", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment() | (limits or {}),
        )
        self.loaded = self.answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin
        time.sleep(0.05)  # until the threads of the one asked before have ceased to spin
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        self.close()
        raise RuntimeError(f"{' '.join(self.command)} ended with {self.process.returncode}: see its error above")

    def close(self) -> None:
        self.process.communicate()  # the end of its requests ends it


def serve(load: Callable[[], Loaded]) -> None:
    """Load, then answer a request per line of stdin. Every answer has the process's peak memory until then."""
    start = time.perf_counter()
    respond, facts = load()
    found: dict[str, Any] = facts | {"load s": time.perf_counter() - start}
    while True:
        print(ANSWER + json.dumps(found | {"peak GB": peak_memory()}), flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        found = respond(**json.loads(line))


def peak_memory() -> float:
    """GB that this process has had in memory at most, what it has mapped of files included.

    Not `ru_maxrss` where there is another way: a child process begins with its parent's.
    """
    status = Path("/proc/self/status")
    if not status.exists():  # macOS
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e9
