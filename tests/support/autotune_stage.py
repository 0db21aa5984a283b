"""What the tests of autotuning share: a cache of their own, and a worker that misbehaves as it is told."""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from sparse24_kernels import GemmProblem
from sparse24_kernels.gemm import autotune
from sparse24_kernels.gemm.autotune import Verdict
from sparse24_kernels.gemm.autotune import table as autotune_table
from sparse24_kernels.gemm.autotune.table import Entry, Environment, Measured
from sparse24_kernels.gemm.problem import Algorithm

CPU = torch.device("cpu")
HERE = Environment("Test GPU", "9.0", "2.13.0", "801")
PROBLEM = GemmProblem(64, 4096, 128, torch.bfloat16, True, True)

WORKER = """
import json, os, resource, signal, sys, time
from multiprocessing.connection import Connection
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
behaviour = json.loads(sys.argv[1])
log = open(sys.argv[2], "a")
pipe = Connection(int(sys.argv[3]))
while True:
    try:
        request = json.loads(pipe.recv_bytes())
    except EOFError:
        break
    algorithm = request["algorithm"]
    def reply(**what):
        pipe.send_bytes(json.dumps(what).encode())
    if algorithm is None:
        log.write("prepare\\n"); log.flush()
        reply(ok=True, max_id=behaviour.get("max_id"))
        continue
    name = f"{algorithm[0]}" if algorithm[1] == 1 else f"{algorithm[0]}/{algorithm[1]}"
    log.write(f"{name}\\n"); log.flush()
    do = behaviour.get(name, "reject")
    if isinstance(do, list):
        do = do.pop(0) if len(do) > 1 else do[0]
    if isinstance(do, (int, float)): reply(ok=True, sparse_us=do, dense_us=100.0)
    elif do == "hang": time.sleep(1000)
    elif do == "crash": os.kill(os.getpid(), signal.SIGSEGV)
    elif do == "exit": sys.exit(3)
    elif do == "wrong": reply(ok=False, reason="wrong numbers")
    elif do == "noise": print("library says hello", flush=True); reply(ok=True, sparse_us=80.0, dense_us=100.0)
    else: reply(ok=False, reason="not supported")
"""


@dataclass
class StandIn:
    """A worker that behaves as told, by algorithm: "3" or "3/2" with split-k, a time of sparse in us or a misdeed."""

    folder: Path
    behaviour: dict
    log: Path = field(init=False)

    def __post_init__(self):
        self.log = self.folder / "tried"
        self.script = self.folder / "worker.py"
        self.script.write_text(WORKER)

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-S", str(self.script), json.dumps(self.behaviour), str(self.log)]

    def tried(self) -> list[str]:
        return [line for line in self.log.read_text().split() if line != "prepare"]


def measured(id: int, sparse_us: float, split_k: int = 1) -> Measured:
    return Measured(Algorithm(id, split_k), sparse_us, 100.0)


def remember(problem: GemmProblem, *candidates: Measured, environment: Environment = HERE) -> Path:
    """Into the user's cache, as tuning in another process does."""
    autotune_table.write(environment, autotune_table.read(environment) | {problem: Entry(candidates)})
    autotune.reset()
    return environment.path()


def tune(
    problems: Iterable[GemmProblem], device: torch.device, *, worker: list[str] | None = None, **options: Any
) -> dict[GemmProblem, Verdict]:
    """`autotune.tune`, with the command of another worker."""
    with mock.patch.object(autotune, "WORKER", worker or autotune.WORKER):
        return autotune.tune(problems, device, **options)
