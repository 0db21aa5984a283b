"""How long a GEMM takes on the device, without what Python and the library need to launch it.

torch's operator sets up and tears down a cuSPARSELt plan in every call, which takes the host 50 to 600 us (pytorch
issues 177866 and 179642); cuBLAS needs a few. Timed naively, small sparse GEMMs lose for what a CUDA graph, or a queue
of other work in front of them, hides. So a call is captured in a graph and replayed.
"""

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Sample = Callable[[], tuple[float, Tensor]]
"""Takes one sample: microseconds on the device, with cold caches, and the result."""

Result = TypeVar("Result")


def sampler(call: Callable[[], Tensor], flush: Tensor) -> Sample:
    """A function that times `call`. `flush` is memory several times as large as the L2 cache.

    Raises:
        RuntimeError: no CUDA graph takes the call.
    """
    replay, result = capture(call)

    def sample() -> tuple[float, Tensor]:
        result.fill_(math.nan)  # what the last replay left must not pass for what this one writes
        for _ in range(4):  # empties the caches, and keeps the device busy while the replay is issued
            flush.zero_()
        return elapsed(replay), result

    return sample


def capture(call: Callable[[], Result]) -> tuple[Callable[[], object], Result]:
    """The replay of a call by a CUDA graph, and its result, which every replay writes anew."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # what is done only once, such as loading kernels, is not captured
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph.replay, result


def elapsed(run: Callable[[], object]) -> float:
    """Microseconds that the device takes for `run`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3
