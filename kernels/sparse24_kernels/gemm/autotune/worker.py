"""The process that runs candidates, which may hang, crash or be wrong. It answers requests through a pipe.

Run as `python -m sparse24_kernels.gemm.autotune.worker FILE_DESCRIPTOR`; `search.py` has the requests and replies.
"""

import json
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from ..problem import Algorithm
from .check import Case, Library, Rejected, prepare, try_candidate
from .table import parse_problem


class Worker:
    """Answers requests; holds the inputs of one problem at a time."""

    def __init__(self, make_library: Callable[[torch.device], Library]):
        self.make_library = make_library
        self.library: Library | None = None
        self.cases: list[Case] = []

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.library is None:
            self.library = self.make_library(torch.device(request["device"]))
        try:
            if request["algorithm"] is None:
                self.cases = []  # frees the last problem's memory first
                self.cases = prepare(self.library, parse_problem(request["problem"]))
                return {"ok": True, "max_id": self.library.last_id()}
            algorithm = Algorithm(*request["algorithm"])
            sparse_us, dense_us = try_candidate(self.library, self.cases, algorithm, request["final"])
            return {"ok": True, "sparse_us": sparse_us, "dense_us": dense_us}
        except Rejected as error:
            return {"ok": False, "reason": str(error)}
        except RuntimeError as error:
            # A refusal leaves the device as it was. After a device fault this line raises again: the process ends, and
            # the parent starts another.
            self.library.synchronize()
            return {"ok": False, "reason": str(error).strip().split("\n")[0]}


@torch.no_grad()
def main(pipe: Connection, make_library: Callable[[torch.device], Library] = Library) -> None:
    """Answer until the parent closes the pipe."""
    worker = Worker(make_library)
    while True:
        try:
            request = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        signal.alarm(300)  # ends a hang even if the parent is gone
        pipe.send_bytes(json.dumps(worker.answer(request)).encode())
        signal.alarm(0)


if __name__ == "__main__":
    main(Connection(int(sys.argv[-1])))
