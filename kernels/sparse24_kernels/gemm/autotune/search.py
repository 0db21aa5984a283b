"""The search for a problem's fastest correct algorithm: which candidates, in which order, for how long.

cuSPARSELt can hang, crash and write past its buffers, so no candidate runs in this process. A child (`worker.py`) gets
one candidate per request, as JSON through a pipe of its own:

    {"device": "cuda:0", "problem": [...], "algorithm": [id, split_k], "final": true}
    {"ok": true, "sparse_us": 188.7, "dense_us": 289.5}
    {"ok": false, "reason": "wrong numbers ..."}

"algorithm": null prepares a problem; that reply has "max_id". Without "final", one input is checked and three times are
taken; finalists are checked on every input and timed longer.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch

from ..problem import Algorithm, GemmProblem
from .table import Entry, Measured, problem_record

WORKER = [sys.executable, "-P", "-m", f"{__package__}.worker"]

CANDIDATE_SECONDS = 10.0
"""For one candidate: more than a check and its timing take at any size. After it, the candidate counts as hung."""
PREPARE_SECONDS = 180.0
"""For starting Python, torch and the device, drawing inputs, and the first runs of dense math."""
KILL_SECONDS = 30.0
"""A process whose device is stuck may take this long to end."""

MOST_IDS = 64
"""Ids that are tried where the library does not say how many it has. It refuses the others quickly."""
FIRST_IDS = (0, 17, 20, 12)
"""Tried before the others: the default, and the usual winners of bf16 on an H100 (published sweep:
github.com/bcacdwk/vllmbench at 92a8ca4)."""
SPLIT_K = (2, 4)
FEW = 3
"""How many of the fastest are tried with split-k, and how many without it are measured again at the end."""


class Died(Exception):
    """The child process ended, or cannot make a problem's inputs; the message says why."""


class Child:
    """A worker process, started by the first request and again after it died."""

    def __init__(self, command: list[str]):
        self.command = command
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send one request and wait for its reply.

        Raises:
            Died: no reply came within `seconds`, or the child ended.
        """
        process = self._process or self._start()
        try:
            self._pipe.send_bytes(json.dumps(request).encode())
            if self._pipe.poll(seconds):
                return json.loads(self._pipe.recv_bytes())
            how = f"no answer within {seconds:g} s"
        except (OSError, EOFError):
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
            code = process.poll() or 0
            how = f"it died of {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"
        self.stop()
        raise Died(how)

    def _start(self) -> subprocess.Popen[bytes]:
        self._pipe, theirs = Pipe()
        paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
        with theirs:  # closed here, so that the pipe ends with the child
            self._process = subprocess.Popen(
                [*self.command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal then reaches this process alone, which ends the child
            )
        return self._process

    def stop(self) -> None:
        """Kill the process, if one runs.

        Raises:
            RuntimeError: it does not end.
        """
        process, self._process = self._process, None
        if process is None:
            return
        self._pipe.close()
        process.kill()
        try:
            process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            raise RuntimeError("the autotuner's worker does not end when killed: the device seems stuck") from None


class Search:
    """The search for one problem. `likely` ids are tried first, and `report` gets every new number of candidates."""

    def __init__(
        self,
        problem: GemmProblem,
        device: torch.device,
        child: Child,
        likely: Iterable[int],
        report: Callable[[int, float | None], None],
    ):
        self.child, self.likely, self.report = child, likely, report
        self.request = {"device": str(device), "problem": problem_record(problem)}
        self.is_prepared = False
        self.tried = 0
        self.best: float | None = None
        self.failures: list[str] = []

    def run(self, seconds: float) -> Entry:
        """Try candidates for about `seconds`; the final round takes additional time.

        Raises:
            Died: nothing could be tried.
        """
        last = self._prepare()
        start = time.monotonic()
        screened = self._screen(self._ids(last), start + 0.7 * seconds)
        fastest = [found.algorithm.id for found in sorted(screened, key=_by_speedup)[:FEW]]
        variants = (Algorithm(number, split_k) for split_k in SPLIT_K for number in fastest)
        screened += self._screen(variants, start + 0.9 * seconds)
        # Checked on every input and measured again: the best of many measurements is biased. Where one fails, the next
        # takes its place, and enough without split-k are left for deterministic runs.
        final: list[Measured] = []
        for found in sorted(screened, key=_by_speedup):
            if sum(passed.algorithm.split_k == 1 for passed in final) < FEW:
                final += self._try(found.algorithm, final=True)
        return Entry(tuple(sorted(final, key=_by_speedup)), tuple(self.failures))

    def _ids(self, last: int | None) -> Iterator[Algorithm]:
        """Algorithms without split-k, the likely ones first, because time may not last for all."""
        count = MOST_IDS if last is None else min(MOST_IDS, last + 1)
        likely = list(dict.fromkeys(number for number in (*self.likely, *FIRST_IDS) if number < count))
        yield from map(Algorithm, likely)
        yield from (Algorithm(number) for number in range(count) if number not in likely)

    def _screen(self, algorithms: Iterable[Algorithm], deadline: float) -> list[Measured]:
        passed: list[Measured] = []
        for algorithm in algorithms:
            if time.monotonic() > deadline:
                break
            passed += self._try(algorithm, final=False)
        return passed

    def _try(self, algorithm: Algorithm, final: bool) -> list[Measured]:
        """A list with the measurement of one candidate, or an empty list."""
        if not self.is_prepared:
            self._prepare()
        try:
            reply = self.child.ask({**self.request, "algorithm": algorithm, "final": final}, CANDIDATE_SECONDS)
        except Died as error:
            self.is_prepared, reply = False, {"ok": False, "reason": str(error)}
        found = []
        if reply["ok"]:
            found = [Measured(algorithm, reply["sparse_us"], reply["dense_us"])]
            self.best = max(self.best or 0.0, found[0].speedup)
        else:
            self.failures.append(f"{algorithm}: {reply['reason']}"[:300])
        self.tried += 1
        self.report(self.tried, self.best)
        return found

    def _prepare(self) -> int | None:
        """Have the child make the problem's inputs; the library's largest id, or None where it does not say."""
        reply = self.child.ask({**self.request, "algorithm": None}, PREPARE_SECONDS)
        if not reply["ok"]:
            raise Died(f"the problem cannot be tried: {reply['reason']}"[:300])
        self.is_prepared = True
        return reply["max_id"]


def _by_speedup(measured: Measured) -> float:
    return -measured.speedup
