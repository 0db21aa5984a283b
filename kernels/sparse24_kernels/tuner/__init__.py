"""Sparse or dense, and by which algorithm: answered from measurements, and dense where there is none.

    tune(problems, device)     measure, in a child process, and remember: `hf-sparse24 tune` calls it
    choose(problem, device)    what to run now: called for every product

A verdict holds for a *bucket* of n (`records.bucket`), so that varying batch shapes need no entry each, and is
given once: it stays the same until the process ends, `tune` measures its bucket, or `reset` is called. It depends on
what is measured in the bucket and not on which n asks first, so that all processes of a training run agree and a graph
that `torch.compile` makes for a dynamic n holds for the bucket.
"""

import operator
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from .. import cusparselt
from ..cusparselt import Algorithm, Problem
from .child import WORKER, Child
from .records import Environment, Measured, bucket, current_environment
from .search import Search
from .table import Table, forget_warnings

__all__ = ["Environment", "Progress", "Verdict", "choose", "current_environment", "reset", "tune"]

MARGIN = 1.02
"""How much faster sparse must have been. The promise is to lose at most 2 % against dense anywhere; the median of an
interleaved measurement may be off by a per cent or two in the next run, and at this margin that is no loss."""

NOT_TUNED = "not tuned: run `hf-sparse24 tune`"


class Verdict(NamedTuple):
    """What to run: `backend` is "cusparselt" or "dense".

    `algorithm` is the fastest that is known to be right, also where dense is faster yet, with its times; None if there
    is none.
    """

    backend: str
    algorithm: Algorithm | None
    sparse_us: float | None
    dense_us: float | None
    reason: str


class Progress(NamedTuple):
    """For a progress bar: problem `number` (from 0) of `total`, candidates tried for it, best speed-up of the round.

    As text, one line to print.
    """

    problem: Problem
    number: int
    total: int
    tried: int
    best_speedup: float | None

    def __str__(self) -> str:
        best = "" if self.best_speedup is None else f", best {self.best_speedup:.2f} times dense"
        shape = f"{self.problem.m} x {self.problem.n} x {self.problem.k}"
        return f"{self.number + 1} of {self.total}: {shape}, {self.tried} candidates tried{best}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


_given: dict[tuple, Verdict] = {}
_tables: dict[Environment, Table] = {}
_attempted: set[tuple] = set()
_lock = threading.RLock()  # backward asks from threads of its own


def choose(problem: Problem, device: torch.device, tune: bool = False) -> Verdict:
    """What to run for `problem` on `device`.

    Under `torch.use_deterministic_algorithms(True)`, algorithms that split k are left out.

    Args:
        problem: n may be anything, and symbolic while a graph is traced.
        tune: measure now, at the bucket's largest n, what has not been measured. It takes many seconds, once.
    """
    # Tracing: comparisons guard n's bucket, `index` specialises the others, and what is called below sees constants.
    return _verdict(
        operator.index(problem.m),
        bucket(problem.n),
        operator.index(problem.k),
        problem.dtype,
        problem.dense_is_column_major,
        problem.transposed,
        device,
        torch.are_deterministic_algorithms_enabled(),
        tune,
    )


@torch.compiler.assume_constant_result
def _verdict(m, n, k, dtype, column_major, transposed, device, deterministic, measure) -> Verdict:
    key = (m, n, k, dtype, column_major, transposed, device, deterministic)
    verdict = _given.get(key)
    if verdict is not None and (not measure or key in _attempted):
        return verdict
    with _lock:
        problem = Problem(*key[:6])
        if measure and key not in _attempted:
            _attempted.add(key)
            if _decide(problem, device, deterministic).reason == NOT_TUNED:
                tune([problem], device)
        return _given.setdefault(key, _decide(problem, device, deterministic))


def _decide(problem: Problem, device: torch.device, deterministic: bool) -> Verdict:
    why_not = cusparselt.why_not(device) or cusparselt.why_not_matrix(problem.m, problem.k, problem.dtype)
    if why_not:
        return _dense(why_not)
    table = _table(current_environment(device))
    entries = table.in_bucket_of(problem)
    if not entries:
        return _dense(NOT_TUNED)
    verdicts = [_judge(table, measured_at, entries[measured_at], deterministic) for measured_at in entries]
    # Sparse only where it won at every n that was measured in the bucket; the largest comes first.
    return next((verdict for verdict in verdicts if verdict.backend == "dense"), verdicts[0])


def _judge(table: Table, problem: Problem, candidates: tuple[Measured, ...], deterministic: bool) -> Verdict:
    at = f"measured at {problem.m} x {problem.n} x {problem.k}"
    usable = [found for found in candidates if table.why_denied(problem, found.algorithm) is None]
    if not usable:
        return _dense(f"{at}: no algorithm passes the checks")
    if deterministic:
        usable = [found for found in usable if found.algorithm.split_k == 1]
        if not usable:
            return _dense(f"{at}: no algorithm is deterministic")
    algorithm, sparse_us, dense_us = best = max(usable, key=lambda found: found.speedup)
    reason = f"{at}: sparse {sparse_us:.1f} us, dense {dense_us:.1f} us, {best.speedup:.2f} times as fast"
    if best.speedup < MARGIN:
        return Verdict("dense", algorithm, sparse_us, dense_us, f"{reason} where {MARGIN} is asked for")
    return Verdict("cusparselt", algorithm, sparse_us, dense_us, reason)


def _dense(reason: str) -> Verdict:
    return Verdict("dense", None, None, None, reason)


def _table(environment: Environment) -> Table:
    with _lock:
        if environment not in _tables:
            _tables[environment] = Table(environment)
        return _tables[environment]


def tune(
    problems: Iterable[Problem],
    device: torch.device,
    *,
    seconds_per_problem: float = 20,
    worker: list[str] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> dict[Problem, Verdict]:
    """Measure problems, save after each, and return what `choose` now says of them.

    Candidates run in a child process, each within a time limit. One that hangs, crashes or gives wrong numbers is
    remembered as such and never run again in this environment. Ctrl-C ends the child; what is done is kept, and
    KeyboardInterrupt goes on to the caller.

    Args:
        seconds_per_problem: for trying candidates; preparing a problem and the final round of a few come on top.
        worker: the command of another worker (tests).
        on_progress: called after every candidate.

    Raises:
        ValueError: there is nothing to tune on this device.
    """
    if why_not := cusparselt.why_not(device):
        raise ValueError(f"nothing to tune: {why_not}")
    if device.type == "cuda" and device.index is None:  # the child has a current device of its own
        device = torch.device("cuda", torch.cuda.current_device())
    table = _table(current_environment(device))
    problems = list(dict.fromkeys(problems))
    verdicts = {}
    with Child(WORKER if worker is None else worker) as child:
        for number, problem in enumerate(problems):

            def report(tried: int, best: float | None, problem: Problem = problem, number: int = number) -> None:
                if on_progress is not None:
                    on_progress(Progress(problem, number, len(problems), tried, best))

            why_not = cusparselt.why_not_matrix(problem.m, problem.k, problem.dtype)
            try:
                if why_not is None:
                    why_not = Search(table, problem, device, child, report).run(seconds_per_problem)
            finally:
                table.save()
                _forget(problem)
            verdicts[problem] = _dense(why_not) if why_not else choose(problem, device)
    return verdicts


def reset() -> None:
    """Forget all verdicts and tables of this process; files are read again when asked. Compiled graphs keep theirs."""
    with _lock:
        _given.clear()
        _tables.clear()
        _attempted.clear()
        forget_warnings()


def _forget(problem: Problem) -> None:
    alike = tuple(problem._replace(n=bucket(problem.n)))
    with _lock:
        for key in [key for key in _given if key[:6] == alike]:
            del _given[key]
