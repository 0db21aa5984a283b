"""One way to time: alternatives take turns, and what is compared is compared within a turn.

A sampler takes one sample, in seconds per call. `take_turns` asks each for one in every turn, so that a slow moment of
the machine, or a change of clocks, meets all of them; `over` gives the ratios of two, turn by turn.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from statistics import median, quantiles
from typing import TypeVar

Call = Callable[[], object]
Maker = Callable[[], list[Call]]
"""Makes calls that do the same work on several sets of arguments."""
Sampler = Callable[[], float]
"""Takes one sample, in seconds per call."""
Name = TypeVar("Name", bound=Hashable)


def turns(least: int, most: int, seconds: float = float("inf")) -> Iterator[int]:
    """Count turns from -1, a warm-up, up to `most`; after `least` of them, stop when the seconds are over."""
    start = time.perf_counter()
    for turn in range(-1, most):
        if turn >= least and time.perf_counter() - start > seconds:
            return
        yield turn


def take_turns(samplers: Mapping[Name, Sampler], least: int, most: int = 0, seconds: float = 0) -> dict[Name, list]:
    """The samples of each way, one a turn, without those of the warm-up turn."""
    rounds = []
    for turn in turns(least, max(least, most), seconds):
        found = {way: sample() for way, sample in samplers.items()}
        rounds += [found] * (turn >= 0)
    return {way: [found[way] for found in rounds] for way in samplers}


def clocked(call: Call) -> Sampler:
    """A sampler of one call on a CPU."""

    def sample() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return sample


class Cycle:
    """A sampler of calls that follow each other, several a sample: each finds its weight out of the cache."""

    def __init__(self, calls: list[Call], seconds: float):
        """A sample takes about so many seconds."""
        self.calls = cycle(calls)
        next(self.calls)()  # a warm-up
        self.count = max(1, min(len(calls), round(seconds / clocked(next(self.calls))())))

    def __call__(self) -> float:
        start = time.perf_counter()
        for _ in range(self.count):
            next(self.calls)()
        return (time.perf_counter() - start) / self.count


def over(base: Sequence[float], own: Sequence[float]) -> list[float]:
    """How many times as fast as the base a way was within a turn, as `middle` gives it."""
    return middle(other / mine for other, mine in zip(base, own, strict=True))


def middle(values: Iterable[float]) -> list[float]:
    """The 10 % quantile, the median and the 90 % quantile, to four digits."""
    found = list(values)
    tenths = quantiles(found, n=10, method="inclusive") if len(found) > 1 else found * 9
    return [float(f"{x:.4g}") for x in (tenths[0], median(found), tenths[8])]


def spread(seconds: Iterable[float]) -> dict[str, float]:
    """The time of a way in a row, in microseconds."""
    return dict(zip(("p10_us", "us", "p90_us"), middle(x * 1e6 for x in seconds)))


def describe(error: BaseException) -> str:
    """An error as one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
