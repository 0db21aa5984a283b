"""How time is measured: on a CUDA device, and on a CPU in turns.

On a CUDA device, calls on several sets of arguments, together several times the size of the L2 cache, are captured in
one CUDA graph with all their results alive. So every call finds its inputs in device memory, what earlier calls wrote
is written back during later ones, and the time contains neither Python nor launches. Other calls are not timed.
"""

import gc
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from itertools import cycle
from statistics import median, quantiles
from typing import Any

import torch
from sparse24_kernels.gemm import cusparselt
from sparse24_kernels.gemm.measure import capture, elapsed

Call = Callable[[], object]
Maker = Callable[[], list[Call]]
"""Makes calls that do the same work on several sets of arguments."""
Sampler = Callable[[], float]
"""Takes one sample, in seconds per call."""


class Cuda:
    """The current GPU. Tests have a stand-in with made-up times."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.device)
        self.name, self.l2_bytes = properties.name, properties.L2_cache_size
        self.facts = {"device": self.name, "memory_bytes": properties.total_memory, "l2_bytes": self.l2_bytes}
        self.facts |= {"cuda": torch.version.cuda, "driver": answer(*NVIDIA_SMI, "--query-gpu=driver_version")}
        self.facts |= {"triton": version("triton"), "cusparselt": str(cusparselt.version())}

    def clocks(self) -> str | None:
        """Clocks, power and temperature now; None where nvidia-smi does not tell."""
        return answer(*NVIDIA_SMI, "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu")

    def prepare(self, calls: list[Call]) -> Sampler:
        """A sampler for these calls. All results are alive during the capture: no memory is used twice."""
        replay, _ = capture(lambda: [call() for call in calls])
        elapsed(replay)  # the first replay also loads the graph
        repeats = max(1, min(100, round(1e3 / elapsed(replay))))  # about a millisecond per sample
        return lambda: elapsed(lambda: [replay() for _ in range(repeats)]) / 1e6 / repeats / len(calls)

    def forget(self) -> None:
        """Give freed memory back, that of dead graphs included."""
        gc.collect()
        with suppress(RuntimeError):  # where the device is lost, what follows fails too, and says so
            torch.cuda.empty_cache()


def in_turn(samplers: dict[str, Sampler], samples: int = 9) -> dict[str, dict[str, Any]]:
    """Sample ways in turn, so that a change of clocks affects all of them; the median counts."""
    rounds = [{name: sample() * 1e6 for name, sample in samplers.items()} for _ in range(samples)]
    times = {name: sorted(found[name] for found in rounds) for name in samplers}
    return {name: {"us": median(x), "min_us": x[0], "max_us": x[-1]} for name, x in times.items()}


class Turns:
    """A way to do something, whose calls take turns: each finds its weight out of cache."""

    def __init__(self, calls: list[Call], seconds: float, scale: float = 1):
        """A sample takes about so many seconds; its time per call is multiplied by `scale`."""
        self.calls, self.scale = cycle(calls), scale
        for _ in range(2):  # the first is a warm-up
            start = time.perf_counter()
            next(self.calls)()
            self.once = time.perf_counter() - start
        self.count = max(1, min(len(calls), round(seconds / self.once)))

    def sample(self) -> float:
        """Seconds per call."""
        start = time.perf_counter()
        for _ in range(self.count):
            next(self.calls)()
        return (time.perf_counter() - start) / self.count * self.scale


def turns(least: int, most: int, seconds: float = float("inf")) -> Iterator[int]:
    """Count turns from -1, a warm-up, up to `most`; after `least` of them, stop when the seconds are over."""
    start = time.perf_counter()
    for turn in range(-1, most):
        if turn >= least and time.perf_counter() - start > seconds:
            return
        yield turn


def middle(values: Iterable[float]) -> list[float]:
    """The 10 % quantile, the median and the 90 % quantile, to four digits."""
    found = list(values)
    tenths = quantiles(found, n=10, method="inclusive") if len(found) > 1 else found * 9
    return [float(f"{x:.4g}") for x in (tenths[0], median(found), tenths[8])]


def spread(us: Iterable[float]) -> dict[str, float]:
    """The time of a way in a row, from its samples in microseconds."""
    return dict(zip(("p10_us", "us", "p90_us"), middle(us)))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use so many threads in the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class OutOfTime(BaseException):
    """Raised by `time_limit`; not an Exception, so that no code in between catches it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the block after so many seconds (main thread only; between two Python instructions)."""

    def stop(*_: object) -> None:
        raise OutOfTime(f"not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def describe(error: BaseException) -> str:
    """An error as one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


NVIDIA_SMI = ("nvidia-smi", "--format=csv,noheader", "--id=0")


def answer(*command: str) -> str | None:
    """What a command prints; None where it fails or is absent."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
