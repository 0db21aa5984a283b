"""The search for a problem's fastest correct algorithm: which candidates, in which order, for how long.

No candidate runs in this process. A child (`worker.py`) gets one candidate per request:

    {"device": "cuda:0", "environment": [...], "problem": [...], "algorithm": [id, split_k, mode], "effort": 1}
    {"ok": true, "sparse_us": 188.7, "dense_us": 289.5}
    {"ok": false, "reason": "wrong numbers ...", "deny": true}

"algorithm": null prepares a problem; that reply may have "max_id". "deny" means that the algorithm must not be used in
this bucket again, "rejected" that the library itself refused the call. "effort" 0 screens: one input is checked, three
times are taken. Finalists are checked on every input and timed longer.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ..problem import Algorithm, GemmProblem
from .child import Child, Died
from .records import SEGMENT_K, Measured, problem_record
from .table import Table

CANDIDATE_SECONDS = 10.0
"""For one candidate: more than a check and its timing take at any size. After it, the candidate counts as hung."""
PREPARE_SECONDS = 180.0
"""For starting Python, torch and the device, drawing inputs, and the first runs of dense math."""

MOST_IDS = 64
REJECTED_IN_A_ROW = 8
"""Ids are tried until so many in a row are refused or kill the child. The range of ids differs between dtypes and
layouts, so no constant marks its end, and a few refused ids may come before good ones."""
FIRST_IDS = (0, 17, 20, 12)
"""Tried before the others: the default, and the usual winners of bf16 on an H100 (published sweep:
github.com/bcacdwk/vllmbench at 92a8ca4)."""
SPLIT_K = (2, 4, SEGMENT_K)
"""Segment-k last: it was seen to hang."""
FEW = 3
"""How many of the fastest are tried with split-k, and how many are measured again at the end."""


class Search:
    """The search for one problem. A failure goes into the table at once, so it is kept whatever happens next."""

    def __init__(
        self,
        table: Table,
        problem: GemmProblem,
        device: torch.device,
        child: Child,
        report: Callable[[int, float | None], None],
    ):
        self.table, self.problem, self.child, self.report = table, problem, child, report
        self.request = {
            "device": str(device),
            "environment": list(table.environment),
            "problem": problem_record(problem),
        }
        self.is_prepared = False
        self.rejected_in_a_row = 0
        self.tried = 0
        self.untimed = ""  # why an algorithm that gave right numbers has no time

    def run(self, seconds: float) -> str | None:
        """Try candidates for about `seconds` and put the outcome into the table.

        Returns:
            None, or why nothing could be measured.
        """
        try:
            last = self._prepare().get("max_id")
            start = time.monotonic()
            # Time may end each round early, except the final one: only its measurements are kept.
            screened: list[Measured] = []
            self._try_all(self._ids(last), screened, start + 0.7 * seconds)
            fastest = [found.algorithm for found in sorted(screened, key=_by_speedup)[:FEW]]
            variants = [Algorithm(best.id, split_k) for split_k in SPLIT_K for best in fastest]
            self._try_all(variants, screened, start + 0.9 * seconds)
            final = self._final_round(screened)
        except Died as error:
            return f"the worker failed: {error}"
        except Unprepared as error:
            return str(error)
        if not final and self.untimed:
            return f"no algorithm could be timed: {self.untimed}"
        if not final and time.monotonic() > start + 0.7 * seconds:
            return f"no algorithm passed the checks within {seconds:g} s"
        self.table.add(self.problem, tuple(sorted(final, key=_by_speedup)))
        return None

    def _ids(self, last: Any) -> Iterator[Algorithm]:
        """Algorithms without split-k, the likely ones first, because time may not last for all.

        Likely is what won at other sizes, then `FIRST_IDS`.
        """
        count = min(MOST_IDS, last + 1) if isinstance(last, int) else MOST_IDS
        likely = [number for number in (*self.table.winners(self.problem), *FIRST_IDS) if number < count]
        yield from map(Algorithm, dict.fromkeys(likely))
        self.rejected_in_a_row = 0
        for number in range(count):
            if self.rejected_in_a_row == REJECTED_IN_A_ROW:
                return
            if number not in likely:
                yield Algorithm(number)

    def _final_round(self, screened: list[Measured]) -> list[Measured]:
        """The fastest, and the fastest without split-k, checked on every input and measured again: the best of many
        measurements is biased. Where one fails, the next takes its place."""
        final: list[Measured] = []

        def finalists() -> Iterator[Algorithm]:
            for algorithm in (found.algorithm for found in sorted(screened, key=_by_speedup)):
                deterministic = [found for found in final if found.algorithm.split_k == 1]
                if len(final) < FEW or (algorithm.split_k == 1 and len(deterministic) < FEW):
                    yield algorithm

        self._try_all(finalists(), final, math.inf, effort=3)
        return final

    def _try_all(
        self, algorithms: Iterable[Algorithm], measured: list[Measured], deadline: float, effort: int = 0
    ) -> None:
        """Try candidates until the deadline; what passes goes into `measured` at once."""
        for algorithm in algorithms:
            if time.monotonic() > deadline:
                break
            if self.table.unusable(self.problem, algorithm) is None:
                measured += self._try(algorithm, effort)
                self.tried += 1
                self.report(self.tried, max((found.speedup for found in measured), default=None))

    def _try(self, algorithm: Algorithm, effort: int) -> list[Measured]:
        """A list with the measurement of one candidate, or an empty list."""
        if not self.is_prepared:
            self._prepare()
        try:
            reply = self.child.ask({**self.request, "algorithm": algorithm, "effort": effort}, CANDIDATE_SECONDS)
        except Died as error:
            self.is_prepared = False
            self.rejected_in_a_row += 1
            self.table.fail(self.problem, algorithm, str(error))
            return []
        self.rejected_in_a_row = self.rejected_in_a_row + 1 if reply.get("rejected") is True else 0
        if not reply["ok"]:
            reason = str(reply.get("reason"))[:300]
            if reply.get("deny") is True:
                self.table.fail(self.problem, algorithm, reason)
            elif reply.get("rejected") is not True:
                self.untimed = reason
            return []
        times: list[Any] = [reply.get("sparse_us"), reply.get("dense_us")]
        if not all(type(us) in (int, float) and 0 < us < math.inf for us in times):
            self.table.fail(self.problem, algorithm, f"it reported impossible times: {str(times)[:100]}")
            return []
        return [Measured(algorithm, *map(float, times))]

    def _prepare(self) -> dict[str, Any]:
        """Have the child make the problem's inputs. Tried twice, because a device may need a moment after a crash.

        Raises:
            Died: both times.
            Unprepared: the child replies that it cannot.
        """
        for again in (True, False):
            try:
                reply = self.child.ask({**self.request, "algorithm": None}, PREPARE_SECONDS)
                break
            except Died:
                if not again or not self.child.has_answered:
                    raise
        if not reply["ok"]:
            raise Unprepared(f"the problem cannot be tried: {str(reply.get('reason'))[:300]}")
        self.is_prepared = True
        return reply


class Unprepared(Exception):
    """The child cannot make the problem's inputs, or dense math on them is inaccurate."""


def _by_speedup(measured: Measured) -> float:
    return -measured.speedup
