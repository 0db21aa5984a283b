"""Verdicts from measurements: sparse or dense, and by which algorithm; dense where nothing was measured.

    tune(problems, device)     measures in a child process and stores the result; `hf-sparse24 tune` calls it
    choose(problem, device)    says what to run now; planning calls it for every GEMM

A verdict holds for a *bucket* of n (`table.bucket`), measured at its largest n, so varying batch shapes do not need one
measurement each, all processes of a training run agree, and a graph that torch.compile makes for a dynamic n holds for
the whole bucket. It stays the same until the process ends, `tune` measures its bucket, or `reset` is called.

The modules: `search.py` chooses the candidates and runs `worker.py` in a process of its own, `check.py` and `timing.py`
are what the worker does, `table.py` what is remembered.
"""

import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from .. import cusparselt
from ..problem import Algorithm, GemmProblem
from . import table
from .search import WORKER, Child, Died, Search
from .table import Entry, Environment, Table, bucket, current_environment

__all__ = ["Environment", "Progress", "Verdict", "choose", "current_environment", "reset", "tune"]

MARGIN = 1.02
"""Speedup from which sparse is chosen. Medians of interleaved timings vary by one to two per cent between runs; above
this margin, that variation does not make sparse slower than dense."""

NOT_TUNED = "not tuned: run `hf-sparse24 tune`"


class Verdict(NamedTuple):
    """The decision for a GEMM: `backend` is "cusparselt" or "dense".

    `algorithm` is the fastest that passed its checks, with its times, even where dense is faster; None where none
    passed. `measured` is False where no measurement exists, so nothing is known of the sparse algorithms.
    """

    backend: str
    algorithm: Algorithm | None
    sparse_us: float | None
    dense_us: float | None
    reason: str
    measured: bool


class Progress(NamedTuple):
    """State of a progress bar: problem `number` (from 0) of `total`, candidates tried, best speedup of the round.

    `str` says what is behind the bar: the problem, and what is known of it.
    """

    problem: GemmProblem
    number: int
    total: int
    tried: int
    best_speedup: float | None

    def __str__(self) -> str:
        best = "" if self.best_speedup is None else f", best {self.best_speedup:.2f} times dense"
        return f"{self.problem.m} x {self.problem.n} x {self.problem.k}, {self.tried} candidates tried{best}"


_given: dict[tuple[GemmProblem, torch.device, bool], Verdict] = {}
_tables: dict[Environment, Table] = {}
_lock = threading.RLock()  # autograd calls `choose` from threads of its own


def choose(problem: GemmProblem, device: torch.device) -> Verdict:
    """The verdict for `problem` on `device`; n may be symbolic while torch.compile traces.

    Under `torch.use_deterministic_algorithms(True)`, algorithms that split k are left out.
    """
    # While tracing, comparisons in `bucket` guard n, `index` specialises m and k, and `_verdict` gets constants.
    return _verdict(
        operator.index(problem.m),
        bucket(problem.n),
        operator.index(problem.k),
        problem.dtype,
        problem.dense_is_column_major,
        problem.transposed,
        device,
        torch.are_deterministic_algorithms_enabled(),
    )


@torch.compiler.assume_constant_result
def _verdict(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    column_major: bool,
    transposed: bool,
    device: torch.device,
    deterministic: bool,
) -> Verdict:
    problem = GemmProblem(m, n, k, dtype, column_major, transposed)
    key = (problem, device, deterministic)
    verdict = _given.get(key)
    if verdict is None:
        with _lock:
            verdict = _given.setdefault(key, _decide(*key))
    return verdict


def _decide(problem: GemmProblem, device: torch.device, deterministic: bool) -> Verdict:
    unsupported = cusparselt.unsupported_device(device)
    unsupported = unsupported or cusparselt.unsupported_matrix(problem.m, problem.k, problem.dtype)
    if unsupported:
        return _unmeasured(unsupported)
    entry = _table(current_environment(device)).get(problem)
    return _unmeasured(NOT_TUNED) if entry is None else _judge(problem, entry, deterministic)


def _judge(problem: GemmProblem, entry: Entry, deterministic: bool) -> Verdict:
    where = f"measured at {problem.m} x {problem.n} x {problem.k}"
    if not entry.candidates:
        reason = ": ".join((where, "no algorithm passes the checks", *entry.failures[:1]))
        return Verdict("dense", None, None, None, reason, measured=True)
    usable = [found for found in entry.candidates if found.algorithm.split_k == 1 or not deterministic]
    if not usable:
        return Verdict("dense", None, None, None, f"{where}: no algorithm is deterministic", measured=True)
    algorithm, sparse_us, dense_us = best = max(usable, key=lambda found: found.speedup)
    reason = f"{where}: sparse {sparse_us:.1f} us, dense {dense_us:.1f} us, {best.speedup:.2f} times as fast"
    if best.speedup < MARGIN:
        reason = f"{reason} where {MARGIN} is required"
        return Verdict("dense", algorithm, sparse_us, dense_us, reason, measured=True)
    return Verdict("cusparselt", algorithm, sparse_us, dense_us, reason, measured=True)


def _unmeasured(reason: str) -> Verdict:
    return Verdict("dense", None, None, None, reason, measured=False)


def _table(environment: Environment) -> Table:
    with _lock:
        if environment not in _tables:
            _tables[environment] = table.read(environment)
        return _tables[environment]


def tune(
    problems: Iterable[GemmProblem],
    device: torch.device,
    *,
    seconds_per_problem: float = 20,
    on_progress: Callable[[Progress], None] | None = None,
) -> dict[GemmProblem, Verdict]:
    """Measure the buckets of problems, save after each, and return what `choose` now says of them.

    Candidates run in a child process, each within a time limit. What hangs, crashes or gives wrong numbers is recorded
    with the reason and not used. Ctrl-C ends the child, keeps the buckets that are measured, and raises
    KeyboardInterrupt in the caller.

    Args:
        seconds_per_problem: for trying candidates. Preparing a problem and the final round take additional time.
        on_progress: called after every candidate.

    Raises:
        ValueError: cuSPARSELt cannot run on this device.
        OSError: the measurements cannot be saved.
    """
    if reason := cusparselt.unsupported_device(device):
        raise ValueError(f"nothing to tune: {reason}")
    if device.type == "cuda" and device.index is None:  # the child has a current device of its own
        device = torch.device("cuda", torch.cuda.current_device())
    problems = list(problems)
    buckets = list(dict.fromkeys(problem._replace(n=bucket(problem.n)) for problem in problems))
    unmeasured: dict[GemmProblem, Verdict] = {}
    child = Child(WORKER)
    try:
        for number, problem in enumerate(buckets):

            def report(tried: int, best: float | None, problem: GemmProblem = problem, number: int = number) -> None:
                if on_progress is not None:
                    on_progress(Progress(problem, number, len(buckets), tried, best))

            reason = cusparselt.unsupported_matrix(problem.m, problem.k, problem.dtype)
            try:
                if reason is None:
                    _measure(problem, device, child, seconds_per_problem, report)
            except Died as error:
                reason = str(error)
            if reason is not None:
                unmeasured[problem] = _unmeasured(reason)
    finally:
        child.stop()
    return {found: unmeasured.get(found._replace(n=bucket(found.n))) or choose(found, device) for found in problems}


def _measure(
    problem: GemmProblem,
    device: torch.device,
    child: Child,
    seconds: float,
    report: Callable[[int, float | None], None],
) -> None:
    environment = current_environment(device)
    # Ids that were fastest for other problems of this dtype and layout, the most frequent first.
    alike = [entry.candidates[:1] for key, entry in _table(environment).items() if key[3:] == problem[3:]]
    likely = Counter(found.algorithm.id for first in alike for found in first)
    entry = Search(problem, device, child, [number for number, _ in likely.most_common()], report).run(seconds)
    with _lock:
        found = table.read(environment) | {problem: entry}  # other processes may have saved theirs meanwhile
        table.write(environment, found)
        _tables[environment] = found
        for deterministic in (False, True):
            _given.pop((problem, device, deterministic), None)


def reset() -> None:
    """Forget all verdicts and tables of this process; files are read again when needed. Compiled graphs keep theirs."""
    with _lock:
        _given.clear()
        _tables.clear()
