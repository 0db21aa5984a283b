"""How long a GEMM takes on the device, without what Python and the library need to launch it.

torch's operator sets up and tears down a cuSPARSELt plan in every call, which takes the host 50 to 600 us (pytorch
issues 177866 and 179642); cuBLAS needs a few. Timed naively, small sparse GEMMs lose for what a CUDA graph, or a queue
of other work in front of them, hides. So a call is captured in a graph and replayed. What cannot be captured is issued
while the device is kept busy by a delay, and rejected where issuing it took longer than that.
"""

import math
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Sample = Callable[[], tuple[float, Tensor]]
"""Takes one sample: microseconds on the device, with cold caches, and the result."""

Result = TypeVar("Result")

DELAY_SECONDS = 2e-3
"""How long the device is kept busy in front of a call that cannot be captured. Several times what a call takes."""
HERTZ = 2e9
"""Of the delay's clock, at most: at a lower one it is longer."""


class Exposed(RuntimeError):
    """Issuing the call took longer than the device was kept busy, so its time says nothing."""


def sampler(call: Callable[[], Tensor], flush: Tensor) -> Sample:
    """How `call` is timed. `flush` is memory several times as large as the L2 cache."""
    try:
        replay, result = capture(call)
    except RuntimeError:  # what waits for the device, or allocates beside torch, as a version of the library might
        torch.cuda.synchronize()
        return _delayed(call, flush)

    def sample() -> tuple[float, Tensor]:
        result.fill_(math.nan)  # what the last replay left must not pass for what this one writes
        _empty_caches(flush)
        return elapsed(replay)[0], result

    return sample


def _delayed(call: Callable[[], Tensor], flush: Tensor) -> Sample:
    def sample() -> tuple[float, Tensor]:
        results: list[Tensor] = []
        _empty_caches(flush)
        torch.cuda._sleep(int(DELAY_SECONDS * HERTZ))
        us, host_us = elapsed(lambda: results.append(call()))
        if host_us > 1e6 * DELAY_SECONDS:
            raise Exposed(
                f"no CUDA graph takes this call, and issuing it took {host_us:.0f} us, while the device was kept busy "
                f"for {1e6 * DELAY_SECONDS:.0f}"
            )
        return us, results[0]

    return sample


def capture(call: Callable[[], Result]) -> tuple[Callable[[], object], Result]:
    """Replay of a call by a CUDA graph, and its result, which every replay writes anew."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # what is done only once, such as loading kernels, is not captured
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph.replay, result


def elapsed(run: Callable[[], object]) -> tuple[float, float]:
    """Microseconds that the device takes for `run`, and that the host takes to issue it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin = time.perf_counter()
    start.record()
    run()
    end.record()
    host = time.perf_counter() - begin
    end.synchronize()
    return start.elapsed_time(end) * 1e3, host * 1e6


def _empty_caches(flush: Tensor) -> None:
    for _ in range(4):  # also keeps the device busy while a replay is issued
        flush.zero_()
