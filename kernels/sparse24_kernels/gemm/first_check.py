"""The check of cuSPARSELt on first use: small GEMMs of whole numbers, which fp32 sums exactly."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from .. import reference
from ..hard_problems import nan_in_new_memory
from . import direct

Result = TypeVar("Result")


@torch.no_grad()
def first_difference(device: torch.device, dtype: torch.dtype, operator: str) -> str:
    """Where such as "direct linear 17" is wrong, which is a way of calling, the GEMM and the algorithm. "" where it is
    right, with two biases by one plan too; called directly, in another thread and replayed by a CUDA graph as well."""
    way, gemm, number = operator.split()
    library, is_linear, algorithm = direct.load(), gemm == "linear", int(number)
    generator = torch.Generator(device).manual_seed(0)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-15, 16, shape, generator=generator, device=device).to(dtype)

    matrix, dense = whole(256, 128), whole(48, 128).t() if is_linear else whole(128, 48)
    matrix.masked_fill_(~reference.masks.nm_mask(matrix, 2, 4, 1, False), 0.0)
    biases = [None, whole(256), whole(256)] if is_linear else [None]
    right = matrix.double() @ dense.double()

    on_device = device if device.type == "cuda" else -1
    with torch.cuda.device(on_device):
        if way == "torch" or isinstance(library, str):
            compressed = torch._cslt_compress(matrix).view(len(matrix), -1)
            multiply = partial(torch._cslt_sparse_mm, transpose_result=is_linear, alg_id=algorithm)
        else:
            compressed = direct.compress(library, matrix)
            multiply = partial(direct.matmul, library, transposed=is_linear, algorithm=algorithm)

    def results() -> list[Tensor]:
        with nan_in_new_memory(), torch.cuda.device(on_device):
            return [multiply(compressed, dense, bias=bias) for bias in biases]

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

    places = {"": results}
    if way == "direct":
        places |= {" in another thread": of_another_thread}
        places |= {" in a CUDA graph": replayed} if device.type == "cuda" else {}
    for where, run in places.items():
        for bias, found in zip(biases, run()):
            expected, added = right.t() if is_linear else right, 0 * right[0, 0] if bias is None else bias.double()
            wrong = ~((found - expected - added).abs() <= torch.finfo(dtype).eps * (expected.abs() + added.abs()))
            if wrong.any():  # beyond rounding twice, NaN too
                where += "" if bias is None else ", with a bias"
                return f"wrong numbers in {int(wrong.sum())} of {wrong.numel()} elements{where}"
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
