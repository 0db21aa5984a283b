"""What must be known before anything else on a new GPU, in about a minute: does the library run, what does a call cost
the host, does a CUDA graph take it, is the compressed layout found, and which algorithm ids give which times.

What follows depends on these facts; no row is a result.
"""

import time
from collections.abc import Callable
from functools import partial

import sparse24_kernels as kernels
import torch
from kernel_cases import BF16, draw
from sparse24_kernels import Algorithm, GemmProblem, linear_problem
from sparse24_kernels.gemm import cusparselt
from sparse24_kernels.gemm.autotune import records, search
from sparse24_kernels.gemm.autotune.child import WORKER, Child, Died
from sparse24_kernels.gemm.layout import find_compression
from torch.nn.functional import linear

from .run import NOT_RUN, Row, Run, Section
from .timing import captured, describe, seconds_of

SIZE = 4096
"""Of the square matrices whose GEMM is issued to see what that costs the host."""
LAYOUTS = ((1024, 1024), (14336, 4096), (4096, 14336), (14336, 8192))
PROBLEMS = (linear_problem(8192, 14336, 4096, BF16), linear_problem(16384, 2048, 8192, BF16))
"""Whose ids are all tried: Llama 8B's up projection, and Llama 1B's down projection at 16k tokens."""


class Smoke(Section):
    name, groups, share = "smoke", ("smoke",), 8
    note = "Facts, no results. Ids: microseconds by a CUDA graph after one checked input, or why there are none."

    def entries(self) -> list[str]:
        return [*self.facts()]

    def facts(self) -> dict[str, Callable[[Run], Row]]:
        found: dict[str, Callable[[Run], Row]] = {"library": library, "a call": call}
        found |= {f"layout of {m} x {k}": partial(layout, m, k) for m, k in LAYOUTS}
        return found | {f"ids of {p.m} x {p.n} x {p.k}": partial(ids, p) for p in PROBLEMS}

    def measure(self, run: Run, entry: str) -> Row:
        return {"times": {}, "facts": self.facts()[entry](run)}


def library(run: Run) -> Row:
    device = run.machine.device
    facts = {"unsupported": cusparselt.unsupported_device(device), "version": cusparselt.version()}
    return facts if facts["unsupported"] else facts | {"known to be slow here": cusparselt.is_slow_on(device)}


def call(run: Run) -> Row:
    """Host microseconds to issue a sparse and a dense GEMM, and whether a graph takes the sparse one."""
    x, weight = (draw(run.machine.device, (SIZE, SIZE), BF16, seed=i) for i in range(2))
    compressed = kernels.compress(kernels.nm_prune(weight))
    sparse = partial(kernels.sparse_linear, x, compressed, algorithm=Algorithm())
    ways = {"sparse": sparse, "dense": partial(linear, x, weight)}
    facts: Row = {}
    for way, once in ways.items():
        once()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            once()
        facts[f"{way}, host us"] = (time.perf_counter() - start) / 20 * 1e6
        try:
            facts[f"{way}, us by a graph"] = seconds_of(captured([once])[0], 20) * 1e6
        except Exception as error:
            facts[f"{way}, us by a graph"] = run.note(error, f"capture, {way}")
    return facts


def layout(m: int, k: int, run: Run) -> Row:
    start = time.perf_counter()
    found = find_compression(m, k, BF16, run.machine.device)
    return {"columns": found.columns, "layout found": found.layout >= 0, "seconds": time.perf_counter() - start}


def ids(problem: GemmProblem, run: Run) -> Row:
    """Each id in a process that may die."""
    device = run.machine.device
    request = {"device": str(device), "environment": list(records.current_environment(device))}
    request |= {"problem": records.problem_record(problem), "effort": 0}
    times: dict[int, float] = {}
    errors: dict[int, str] = {}
    dense_us = None
    with Child(WORKER) as child:
        prepared = child.ask({**request, "algorithm": None}, search.PREPARE_SECONDS)
        if not prepared["ok"]:
            raise RuntimeError(prepared["reason"])
        last = prepared.get("max_id")
        for number in range(last + 1 if isinstance(last, int) else search.MOST_IDS):
            if run.left() < 10:
                errors[number] = NOT_RUN
                break
            try:
                reply = child.ask({**request, "algorithm": [number, 1, -1]}, search.CANDIDATE_SECONDS)
            except Died as error:
                errors[number] = describe(error)
                child.ask({**request, "algorithm": None}, search.PREPARE_SECONDS)
                continue
            if reply["ok"]:
                times[number], dense_us = reply["sparse_us"], reply["dense_us"]
            else:
                errors[number] = reply["reason"]
    fastest = ", ".join(f"{number}: {us:.1f}" for number, us in sorted(times.items(), key=lambda found: found[1]))
    failed = ", ".join(f"{number}: {error}" for number, error in errors.items())
    return {"dense, us": dense_us, "id: us": fastest, "id: error": failed}
