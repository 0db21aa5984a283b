"""How time is measured on a CUDA device.

Calls on several sets of arguments, together several times the size of the L2 cache, are captured in one CUDA graph,
with all their results alive: so every call finds its inputs in device memory, what earlier calls wrote is written back
during later ones and paid for, and neither Python nor launches are in the time. Rivals are sampled in turn, so that a
change of clocks meets them alike, and the median counts. What cannot be captured is called in a loop, and the result
says so.
"""

import gc
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import contextmanager
from statistics import median

import torch

Sampler = Callable[[], float]
"""Takes one sample: seconds per call."""


class Cuda:
    """The GPU that is timed. The tests put a machine with a made-up clock in its place."""

    def __init__(self):
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.properties = torch.cuda.get_device_properties(self.device)
        self.l2_bytes = self.properties.L2_cache_size
        self.no_graphs = ""  # why, if so

    @property
    def name(self) -> str:
        return self.properties.name

    def facts(self) -> dict:
        return {
            "device": self.name,
            "multiprocessors": self.properties.multi_processor_count,
            "memory_bytes": self.properties.total_memory,
            "l2_bytes": self.l2_bytes,
            "cuda": torch.version.cuda,
            "driver": _nvidia_smi("driver_version"),
        }

    def clocks(self) -> str | None:
        """Clocks, power and temperature now; None where nvidia-smi does not tell."""
        return _nvidia_smi("clocks.sm,clocks.mem,power.draw,temperature.gpu")

    def copy_bandwidth(self) -> list[float]:
        """Bytes read and written per second by copies of 4 GB, or of what there is room for; a sample each."""
        size = min(4 << 30, torch.cuda.mem_get_info()[0] // 4)
        source = torch.randint(256, (size,), dtype=torch.uint8, device=self.device)
        result = torch.empty_like(source)
        sample = self.prepare([lambda: result.copy_(source)])[0]
        return [2 * size / sample() for _ in range(30)][10:]  # clocks rise during the first

    def prepare(self, calls: list[Callable[[], object]], graph: bool = True) -> tuple[Sampler, str]:
        """A sampler for these calls, which are run first; and how it calls: `"graph"` or `"loop: <why>"`."""
        self._warm_up(calls)
        run, how = (lambda: [call() for call in calls]), f"loop: {self.no_graphs or 'asked for'}"
        if graph and not self.no_graphs:
            try:
                run, how = self._captured(calls), "graph"
            except Exception as error:  # whatever a competitor does that a graph cannot
                how = f"loop: {describe(error)}"
                self._after_a_failed_capture()
        self._seconds(run, 1)  # the first replay also loads the graph
        repeats = max(1, min(100, round(1e-3 / self._seconds(run, 1))))  # about a millisecond per sample
        return lambda: self._seconds(run, repeats) / len(calls), how

    def _captured(self, calls: list[Callable[[], object]]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [call() for call in calls]  # alive until the end of the capture: no memory used twice
        del results
        return graph.replay

    def _after_a_failed_capture(self) -> None:
        """A capture that fails can leave PyTorch's allocator unable to begin another; then the rest is done without."""
        torch.cuda.synchronize()
        try:
            x = torch.ones(16, device=self.device)
            self._captured([lambda: x + 1])()
            torch.cuda.synchronize()
        except Exception as error:
            self.no_graphs = f"none after a failed capture: {describe(error)}"

    def host_seconds(self, calls: list[Callable[[], object]]) -> float:
        """How long Python needs to issue one call, the device being free: the price of calling without a graph."""
        samples = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for call in calls:
                call()
            samples.append((time.perf_counter() - start) / len(calls))
        torch.cuda.synchronize()
        return median(samples)

    def forget(self) -> None:
        """Give freed memory back, that of dead graphs included."""
        gc.collect()
        torch.cuda.empty_cache()

    def _warm_up(self, calls: list[Callable[[], object]]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls[:1] * 2 + calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()

    def _seconds(self, run: Callable[[], object], repeats: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / repeats


def interleave(samplers: dict[str, Sampler], samples: int = 15, limit: float = 2.0) -> dict[str, dict]:
    """Sample each in turn; after `limit` seconds in all, three samples will do. Microseconds."""
    times: dict[str, list[float]] = {name: [] for name in samplers}
    start = time.monotonic()
    for i in range(samples):
        if i >= 3 and time.monotonic() - start > limit:
            break
        for name, sample in samplers.items():
            times[name].append(sample() * 1e6)
    return {
        name: {"median_us": median(x), "min_us": min(x), "max_us": max(x), "samples": len(x)}
        for name, x in times.items()
    }


class OutOfTime(BaseException):
    """Raised by `time_limit`; not an Exception, so that nothing on the way takes it for an error of its own."""


@contextmanager
def time_limit(seconds: float):
    """Raise OutOfTime in the block after so many seconds (main thread only; between two Python instructions)."""

    def stop(*_):
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


def _nvidia_smi(query: str) -> str | None:
    try:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
