"""The process that runs what may hang, crash or be wrong: answers requests, one line of JSON each.

Run as `python -m sparse24_kernels.tuner.worker`; `search.py` has the requests and replies.
"""

import json
import math
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..cusparselt import Algorithm, Problem
from .check import Case, Library, Rejected, prepare, try_candidate
from .records import parse_problem


class Worker:
    """Answers requests; holds the inputs of one problem at a time."""

    def __init__(self, make_library: Callable[[torch.device], Library]):
        self.make_library = make_library
        self.library: Library | None = None
        self.problem: Problem | None = None
        self.cases: list[Case] = []

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.library is None:
            self.library = self.make_library(torch.device(request["device"]))
        try:
            if request["algorithm"] is None:
                return self._prepare(parse_problem(request["problem"]), request["environment"])
            if parse_problem(request["problem"]) != self.problem:
                raise Rejected("this problem was not prepared", deny=False)
            algorithm = Algorithm(*request["algorithm"])
            sparse_us, dense_us = try_candidate(self.library, self.cases, algorithm, request["effort"])
            return {"ok": True, "sparse_us": sparse_us, "dense_us": dense_us}
        except Rejected as why:
            return {"ok": False, "why": str(why), "deny": why.deny}
        except RuntimeError as error:
            # A refusal leaves the device as it was. After a fault this raises again: the process ends, and a fresh one
            # goes on.
            self.library.synchronize()
            return {"ok": False, "why": str(error).strip().split("\n")[0], "rejected": True}

    def _prepare(self, problem: Problem, environment: list[str]) -> dict[str, Any]:
        if list(self.library.environment()) != environment:
            raise Rejected(f"the worker sees another device or library: {self.library.environment()}", deny=False)
        self.problem, self.cases = None, []  # the last problem's memory goes first
        self.cases = prepare(self.library, problem)
        self.problem = problem
        return {"ok": True, "max_id": self.library.last_id()}


def main(make_library: Callable[[torch.device], Library] = Library) -> None:
    """Answer line by line until the input ends."""
    # The pipe is for replies alone: what Python or a C library prints goes to stderr.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(make_library)
    for line in sys.stdin:
        request = json.loads(line)
        if hasattr(signal, "alarm"):  # should the parent be gone, a hang ends all the same
            signal.alarm(math.ceil(request["seconds"]) + 60)
        with torch.no_grad():
            reply = worker.answer(request)
        replies.write(json.dumps({"number": request["number"], **reply}) + "\n")
        replies.flush()
        if hasattr(signal, "alarm"):
            signal.alarm(0)


if __name__ == "__main__":
    main()
