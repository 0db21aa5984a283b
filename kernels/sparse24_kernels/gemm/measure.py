"""One algorithm of a sparse GEMM: its results compared with fp64, then timed in turns with dense math.

Result memory is filled with NaN before a GEMM runs, so an algorithm that returns without writing is noticed. Results
are checked at the smallest and the largest n of a bucket. Equal inputs must give equal bits in all timed runs: some
algorithms are wrong only occasionally (pytorch issue 155333).

A call is captured in a CUDA graph and replayed: that is the time of the device. The host's is measured apart: torch's
operator sets up a plan in every call (pytorch issues 177866 and 179642; 455 to 585 us beside an H100), where cuBLAS
needs 20 us.
"""

import math
import statistics
import timeit
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..hard_problems import nan_in_new_memory
from . import cusparselt
from .first_check import capture
from .problem import GemmProblem, bucket_start

MOST_ERROR = 4.0
"""The largest error of an element, in units of what rounding the result and summing in fp32 can cause: about 1.5."""

ROUNDS = 25


class Case(NamedTuple):
    """One input of a problem, and in the layout of the GEMM's result the correct one and the largest error allowed."""

    problem: GemmProblem
    matrix: Tensor
    compressed: Tensor
    dense: Tensor
    truth: Tensor
    allowed: Tensor

    def by_dense(self) -> Tensor:
        """Dense math on the pruned matrix, with the result in the problem's layout."""
        linear = torch.nn.functional.linear
        if self.problem.transposed:
            return linear(self.dense.t(), self.matrix)
        return linear(self.matrix, self.dense.t())

    def by_algorithm(self, algorithm: int, bias: Tensor | None = None) -> Tensor:
        return cusparselt.matmul(self.compressed, self.dense, bias, self.problem.transposed, algorithm)


def prepare(problem: GemmProblem, device: torch.device) -> list[Case]:
    """The inputs that a problem's algorithms are checked on, of the largest n of its bucket, which is also timed, and
    of the smallest. Some rows, columns and halves of groups are zeros."""
    generator = torch.Generator(device).manual_seed(problem.n)

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, device=device, dtype=problem.dtype)

    matrix = normal(problem.m, problem.k)
    matrix.masked_fill_(~reference.masks.nm_mask(matrix, 2, 4, 1, False), 0.0)
    dense = normal(problem.n, problem.k).t() if problem.transposed else normal(problem.k, problem.n)
    matrix[::16] = 0
    matrix[:, ::16] = 0
    dense[:, ::16] = 0
    compressed = cusparselt.compress(matrix)
    cases = []
    for n in dict.fromkeys([problem.n, bucket_start(problem.n)]):
        columns = dense[:, :n] if problem.transposed else dense[:, :n].contiguous()
        truth = (matrix.double() @ columns.double()).float()  # fp64 is never TF32
        terms = matrix.float().abs() @ columns.float().abs()
        unit = torch.finfo(problem.dtype).eps / 2 * truth.abs() + 2**-23 * math.sqrt(problem.k) * terms
        truth, unit = ((x.t() if problem.transposed else x).contiguous() for x in (truth, unit))
        cases.append(Case(problem._replace(n=n), matrix, compressed, columns, truth, MOST_ERROR * unit))
    return cases


def check(cases: list[Case], algorithm: int) -> Tensor:
    """The algorithm's result of the first case. RuntimeError: one of all cases is wrong, or the library fails."""
    for case in reversed(cases):
        if case.problem.transposed:  # the algorithm itself adds a bias
            _checked(case, algorithm, torch.linspace(-4, 4, case.problem.m, device=case.dense.device))
        result = _checked(case, algorithm, None)
    return result


def _checked(case: Case, algorithm: int, bias: Tensor | None) -> Tensor:
    truth, allowed, dtype = case.truth, case.allowed, case.problem.dtype
    if bias is not None:
        bias = bias.to(dtype)
        truth, allowed = truth + bias, allowed + MOST_ERROR * torch.finfo(dtype).eps / 2 * bias.float().abs()
    with nan_in_new_memory():
        result = case.by_algorithm(algorithm, bias)
    if result.shape != truth.shape or result.dtype != dtype or not result.is_contiguous():
        raise RuntimeError(f"the result is {tuple(result.shape)} {result.dtype}, not {tuple(truth.shape)} {dtype}")
    right = (result.float() - truth).abs() <= allowed
    if not right.all():
        where = f"n = {case.problem.n}{'' if bias is None else ', with a bias'}"
        raise RuntimeError(f"wrong numbers in {int((~right).sum())} of {right.numel()} elements, {where}")
    return result


def try_algorithm(cases: list[Case], algorithm: int) -> tuple[float, float, float]:
    """Microseconds that the sparse GEMM takes, and the dense one: medians of samples taken in turns; and the host, to
    start the sparse one. RuntimeError as `check`, or where bits differ from run to run or a time is impossible."""
    timed, expected = cases[0], check(cases, algorithm)
    call = partial(timed.by_algorithm, algorithm)
    sample_sparse, sample_dense = sampler(call), sampler(timed.by_dense)
    samples = []
    for _ in range(ROUNDS):
        (us, result), (dense_us, _) = sample_sparse(), sample_dense()
        if not torch.equal(result.view(torch.int16), expected.view(torch.int16)):
            raise RuntimeError("other bits from the same inputs")
        samples.append((us, dense_us))
    us, dense_us = map(statistics.median, zip(*samples))
    if not us > 0 or not dense_us > 0:
        raise RuntimeError(f"{us:.3g} us, and {dense_us:.3g} us for dense, cannot be")
    return us, dense_us, host_us(call, timed.dense.device)


def host_us(call: Callable[[], Tensor], device: torch.device) -> float:
    """Microseconds that the host takes to start a call while the device is busy with others. One that waits shows."""
    square = torch.zeros(4096, 4096, dtype=torch.bfloat16, device=device)

    def busy() -> None:  # for some 4 ms of an H100
        for _ in range(20):
            square @ square

    return 1e6 * statistics.median(timeit.repeat(call, busy, number=1, repeat=9))


def sampler(call: Callable[[], Tensor]) -> Callable[[], tuple[float, Tensor]]:
    """A function that takes one sample: microseconds on the device with cold caches, and the result."""
    replay, result = capture(call)
    cache = torch.cuda.get_device_properties(result.device).L2_cache_size
    flush = torch.empty(max(4 * cache, 1 << 26), dtype=torch.uint8, device=result.device)

    def sample() -> tuple[float, Tensor]:
        result.fill_(math.nan)  # what the last replay left must not pass for what this one writes
        for _ in range(4):  # empties the caches, and keeps the device busy while the replay is issued
            flush.zero_()
        return elapsed(replay), result

    return sample


def elapsed(run: Callable[[], object]) -> float:
    """Microseconds that the device takes for `run`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3
