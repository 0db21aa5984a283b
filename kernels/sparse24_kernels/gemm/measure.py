"""One algorithm of a sparse GEMM: its results checked against dense math, then timed in turns with it.

Result memory is filled with NaN before a GEMM runs, so an algorithm that returns without writing is noticed. Results
are compared with fp32, at the smallest and the largest n of a bucket. Equal inputs must give equal bits, in timed runs
too: some algorithms are wrong only occasionally (pytorch issue 155333).

A call is captured in a CUDA graph and replayed: that is the time of the device. torch's operator takes the host 50 to
600 us to set up a plan in every call (pytorch issues 177866 and 179642; 455 to 585 us beside an H100), where cuBLAS
needs 20. That is measured apart.
"""

import math
import statistics
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import reference
from . import cusparselt
from .cusparselt import MULTIPLE
from .problem import GemmProblem, bucket_start, linear_problem, mm_problem

MOST_DENSE_ERROR = 8.0
"""In the units of `Case.error`. A dense result that is less accurate cannot be the reference for sparse ones."""

Result = TypeVar("Result")


class Rejected(Exception):
    """The algorithm failed, or nothing can be compared with it. The message says how."""


class Case(NamedTuple):
    """One input of a problem, and the correct result in the layout of the GEMM's."""

    name: str
    problem: GemmProblem
    matrix: Tensor
    compressed: Tensor
    dense: Tensor
    truth: Tensor
    unit: Tensor
    allowed: float = 0.0

    def error(self, result: Tensor) -> float:
        """The largest error of a result, in units of the error that rounding and fp32 sums can cause per element."""
        return float(((result.float() - self.truth).abs() / self.unit).max())

    def by_dense(self) -> Tensor:
        """Dense math on the pruned matrix, with the result in the problem's layout."""
        linear = torch.nn.functional.linear
        if self.problem.transposed:
            return linear(self.dense.t(), self.matrix)
        return linear(self.matrix, self.dense.t())

    def by_algorithm(self, algorithm: int, bias: Tensor | None = None) -> Tensor:
        return cusparselt.matmul(self.compressed, self.dense, bias, self.problem.transposed, algorithm)


def prepare(problem: GemmProblem, device: torch.device) -> list[Case]:
    """The inputs that a problem's algorithms are checked on; the first is also timed. Rejected: dense math is wrong."""
    cases = []
    with _exact_sums():
        for kind, zeros in (("random numbers", False), ("zeros", True)):
            matrix, dense = _draw(problem, device, zeros)
            truth, unit = _reference(matrix, dense)
            for n in dict.fromkeys([problem.n] if zeros else [problem.n, bucket_start(problem.n)]):
                cases.append(_case(f"{kind}, n = {n}", problem._replace(n=n), matrix, dense, truth, unit))
    return cases


def check(cases: list[Case], algorithm: int) -> Tensor:
    """The algorithm's result of the first case. Rejected: one of all cases is wrong. RuntimeError: the library's."""
    for case in reversed(cases):
        result = _poisoned(partial(case.by_algorithm, algorithm), case)
        _check(case, result)
        _check_again(case, _poisoned(partial(case.by_algorithm, algorithm), case), result)
    if cases[0].problem.transposed:
        _check_bias(cases[0], algorithm)
    return result


@torch.no_grad()
def check_default(device: torch.device, dtype: torch.dtype, operator: str) -> str:
    """The reason why cuSPARSELt's default algorithm is wrong on a small "linear" or "mm"; "" where it is right."""
    problem = linear_problem(48, 128, 64, dtype) if operator == "linear" else mm_problem(128, 48, 64, dtype)
    try:
        check(prepare(problem, device), 0)
    except Rejected as error:
        return str(error)
    return ""


@torch.no_grad()
def stores_as_known(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether cuSPARSELt compresses a small matrix to its sm90 form (`formats.FORMS`)."""
    matrix, _ = _draw(linear_problem(64, 192, 320, dtype), device, zeros=False)
    ours, theirs = reference.packed.for_sm90(matrix), cusparselt.compress_by_library(matrix)
    return ours.shape == theirs.shape and torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


def try_algorithm(cases: list[Case], algorithm: int) -> tuple[float, float, float]:
    """Microseconds that the sparse GEMM takes, and the dense one: medians of samples taken in turns; and the host, to
    start the sparse one. Raises as `check`, and Rejected where a time is impossible."""
    timed, expected = cases[0], check(cases, algorithm)
    call = partial(timed.by_algorithm, algorithm)
    sample_sparse, sample_dense = sampler(call), sampler(timed.by_dense)
    sparse_us: list[float] = []
    dense_us: list[float] = []
    rounds = 1
    while len(sparse_us) < rounds:
        (us, result), (dense, _) = sample_sparse(), sample_dense()
        _check_again(timed, result, expected, " while timed")
        sparse_us.append(us)
        dense_us.append(dense)
        # Small GEMMs are noisier, and cheap to repeat: 15 to 75 samples.
        rounds = 3 * min(25, max(5, int(1e5 / max(1.0, sparse_us[0] + dense_us[0]))))
    us, dense = statistics.median(sparse_us), statistics.median(dense_us)
    if not us > 0 or not dense > 0:
        raise Rejected(f"{us:.3g} us, and {dense:.3g} us for dense, cannot be")
    return us, dense, host_us(call)


def host_us(call: Callable[[], Tensor]) -> float:
    """Microseconds that the host takes to start a call on the device."""
    return 1e6 * statistics.median(timeit.repeat(call, number=1, repeat=9))


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


def elapsed(run: Callable[[], object]) -> float:
    """Microseconds that the device takes for `run`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def _draw(problem: GemmProblem, device: torch.device, zeros: bool) -> tuple[Tensor, Tensor]:
    """A 2:4 matrix, and a dense operand. `zeros`: with empty rows, columns, half-empty groups."""
    generator = torch.Generator(device).manual_seed(problem.n + zeros)

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, device=device, dtype=problem.dtype)

    matrix = normal(problem.m, problem.k)
    matrix.masked_fill_(~reference.masks.nm_mask(matrix, 2, 4, 1, False), 0.0)
    dense = normal(problem.n, problem.k).t() if problem.dense_is_column_major else normal(problem.k, problem.n)
    if zeros:
        matrix[::3] = 0
        matrix[:, ::4] = 0
        dense[:, ::5] = 0
        dense[::2] = 0
    return matrix, dense


def _reference(matrix: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
    """The result in fp32, and the unit that errors are measured in: `u |ab| + 2^-23 sqrt(k) |a||b|`.

    The first term is the rounding of the result to its dtype (u is half its eps). The second is the difference between
    fp32 sums of k terms in different orders, or truncated as tensor cores do; it dominates only where terms cancel.
    """
    wide, finfo = matrix.float(), torch.finfo(matrix.dtype)
    truth = wide @ dense.float()
    sizes = wide.abs_() @ dense.float().abs_()
    floor = max(finfo.smallest_normal * finfo.eps, 1e-37)
    unit = sizes.mul_(2**-23 * math.sqrt(matrix.shape[1])).add_(truth.abs(), alpha=finfo.eps / 2).add_(floor)
    return truth, unit


def _case(name: str, problem: GemmProblem, matrix: Tensor, dense: Tensor, truth: Tensor, unit: Tensor) -> Case:
    """The case of the first n columns of the dense operand. It allows twice the error of dense math, plus one unit."""

    def laid_out(product: Tensor) -> Tensor:  # as the result is: comparing two layouts takes several times as long
        product = product[:, : problem.n]
        return (product.t() if problem.transposed else product).contiguous()

    # In the memory layout of `dense`.
    dense = dense[:, : problem.n].contiguous() if dense.is_contiguous() else dense.t()[: problem.n].t()
    compressed = cusparselt.compress_by_library(matrix)
    case = Case(name, problem, matrix, compressed, dense, laid_out(truth), laid_out(unit))
    error = case.error(case.by_dense())
    if not error <= MOST_DENSE_ERROR:
        raise Rejected(f"the dense result is off by {error:.3g} units on {name}")
    return case._replace(allowed=2 * error + 1)


@contextmanager
def _exact_sums() -> Iterator[None]:
    """Dense math with fp32 sums, to measure errors by. Timed runs have the settings of training."""
    settings, precision = torch.backends.cuda.matmul, torch.get_float32_matmul_precision()
    before = settings.allow_fp16_reduced_precision_reduction, settings.allow_bf16_reduced_precision_reduction
    settings.allow_fp16_reduced_precision_reduction = settings.allow_bf16_reduced_precision_reduction = False
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        settings.allow_fp16_reduced_precision_reduction, settings.allow_bf16_reduced_precision_reduction = before


def _poisoned(call: Callable[[], Tensor], case: Case) -> Tensor:
    """Run a GEMM whose result memory holds NaN, so that elements it does not write are seen."""
    n = case.problem.n + -case.problem.n % MULTIPLE
    garbage = torch.full((case.problem.m * n,), math.nan, dtype=case.problem.dtype, device=case.dense.device)
    del garbage  # the allocator reuses the last freed block, and in the mode below torch fills new memory as well
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        return call()
    finally:
        torch.set_deterministic_debug_mode(before)


def _check(case: Case, result: Tensor, of: str = "") -> None:
    shape = (case.problem.n, case.problem.m) if case.problem.transposed else (case.problem.m, case.problem.n)
    if result.shape != shape or result.dtype != case.problem.dtype or not result.is_contiguous():
        raise Rejected(f"the result is {tuple(result.shape)} {result.dtype}, not {shape} {case.problem.dtype}")
    error = case.error(result)
    if not error <= case.allowed:
        raise Rejected(f"wrong numbers on {case.name}{of}: off by {error:.3g} units, {case.allowed:.3g} allowed")


def _check_again(case: Case, result: Tensor, first: Tensor, of: str = "") -> None:
    """Reject other bits than those of the first run."""
    if not torch.equal(result.view(torch.int16), first.view(torch.int16)):
        raise Rejected(f"other bits from the same inputs on {case.name}{of}")


def _check_bias(case: Case, algorithm: int) -> None:
    """Reject a wrong bias: the algorithm itself adds it."""
    bias = torch.linspace(-4, 4, case.problem.m, device=case.dense.device).to(case.problem.dtype)
    column = bias.float()  # of the transposed result
    half_eps = torch.finfo(bias.dtype).eps / 2
    biased = case._replace(truth=case.truth + column, unit=case.unit + half_eps * column.abs())
    _check(biased, case.by_algorithm(algorithm, bias), " with a bias")
