"""The check of direct calls of cuSPARSELt on first use: small GEMMs of whole numbers, whose results are exact."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from .. import reference
from ..hard_problems import nan_in_new_memory
from . import direct

OPERATORS = ("direct linear", "direct mm")

Result = TypeVar("Result")


@torch.no_grad()
def first_difference(device: torch.device, dtype: torch.dtype, operator: str) -> str:
    """Where one of `OPERATORS` is wrong; "" where it is right, with two biases by one plan too, in another thread, and
    replayed by a CUDA graph."""
    library, is_linear = direct.load(), operator == OPERATORS[0]
    if isinstance(library, str):
        return library
    generator = torch.Generator(device).manual_seed(0)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator, device=device).to(dtype)

    matrix, dense = whole(256, 128), whole(48, 128).t() if is_linear else whole(128, 48)
    matrix.masked_fill_(~reference.masks.nm_mask(matrix, 2, 4, 1, False), 0.0)
    biases = [None, whole(256), whole(256)] if is_linear else [None]
    right = matrix.double() @ dense.double()

    def results() -> list[Tensor]:
        with nan_in_new_memory(), torch.cuda.device(device if device.type == "cuda" else -1):
            compressed = direct.compress(library, matrix)
            return [direct.matmul(library, compressed, dense, bias, is_linear, 0) for bias in biases]

    def of_another_thread() -> list[Tensor]:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(results).result()

    def replayed() -> list[Tensor]:
        with torch.cuda.device(device):
            replay, found = capture(results)
            for result in found:
                result.fill_(math.nan)
            replay()
        return found

    ways = {"": results, " in another thread": of_another_thread}
    for where, way in (ways | ({" in a CUDA graph": replayed} if device.type == "cuda" else {})).items():
        for bias, found in zip(biases, way()):
            expected = right.t() + (0 if bias is None else bias.double()) if is_linear else right
            if not torch.equal(found.double(), expected):
                return f"wrong numbers{where}{'' if bias is None else ', with a bias'}"
    return ""


def capture(call: Callable[[], Result]) -> tuple[Callable[[], object], Result]:
    """The replay of a call by a CUDA graph, and its result, which every replay overwrites."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # what is done only once, such as loading kernels, is not captured
    torch.cuda.current_stream().wait_stream(stream)
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            result = call()
    finally:  # what cannot be captured would leave its stream the current one
        torch.cuda.set_stream(before)
    return graph.replay, result
