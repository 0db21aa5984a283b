"""The check and the timing of an algorithm, which `worker.py` runs for each candidate.

Memory is filled with NaN before each GEMM, so an algorithm that returns without running cannot show an old result.
Every result is compared with fp32, also at the smallest and the largest n of the bucket that the verdict is for.
Without split-k, the same inputs must give the same bits every time, in timed runs too: some algorithms are wrong only
occasionally (pytorch issue 155333).
"""

import math
import statistics
from collections.abc import Callable
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ... import reference as reference_kernels
from .. import cusparselt
from ..cusparselt import MULTIPLE
from ..problem import Algorithm, GemmProblem
from .table import bucket_start
from .timing import Sample, sampler

MOST_DENSE_ERROR = 8.0
"""In the units of `Case.error`. A dense result that is less accurate cannot be the reference for sparse ones."""


class Rejected(Exception):
    """The algorithm failed, or nothing can be compared with it; the message says how."""


class Library:
    """The operations that a check needs from the device and cuSPARSELt."""

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # events belong to the current device

    def last_id(self) -> int | None:
        return torch.backends.cusparselt.get_max_alg_id()

    def compress(self, matrix: Tensor) -> Tensor:
        return cusparselt.compress_by_library(matrix)

    def matmul(
        self, compressed: Tensor, dense: Tensor, problem: GemmProblem, algorithm: Algorithm, bias: Tensor | None = None
    ) -> Tensor:
        return cusparselt.matmul(compressed, dense, bias, problem.transposed, *algorithm)

    def dense(self, matrix: Tensor, dense: Tensor, problem: GemmProblem) -> Tensor:
        """Dense math on the pruned matrix, with the result in the problem's layout: what runs where sparse does not."""
        linear = torch.nn.functional.linear
        return linear(dense.t(), matrix) if problem.transposed else linear(matrix, dense.t())

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def sampler(self, call: Callable[[], Tensor]) -> Sample:
        return sampler(call, self._flush)

    @cached_property
    def _flush(self) -> Tensor:
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        return torch.empty(max(4 * cache, 1 << 26), dtype=torch.uint8, device=self.device)


class Case(NamedTuple):
    """One input of a problem, and its correct result in the layout of the GEMM's."""

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


def reference(matrix: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
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


def draw(problem: GemmProblem, n: int, device: torch.device, zeros: bool) -> tuple[Tensor, Tensor]:
    """A 2:4 matrix, and a dense operand. `zeros`: with empty rows, columns, half-empty groups."""
    generator = torch.Generator(device).manual_seed(n + zeros)

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, device=device, dtype=problem.dtype)

    matrix = normal(problem.m, problem.k)
    matrix.masked_fill_(~reference_kernels.masks.nm_mask(matrix, 2, 4, 1, False), 0.0)
    dense = normal(n, problem.k).t() if problem.dense_is_column_major else normal(problem.k, n)
    if zeros:
        matrix[::3] = 0
        matrix[:, ::4] = 0
        dense[:, ::5] = 0
        dense[::2] = 0
    return matrix, dense


def prepare(library: Library, problem: GemmProblem) -> list[Case]:
    """The inputs that a problem's algorithms are checked on. The first one is also timed.

    Raises:
        Rejected: dense math itself is inaccurate.
    """
    torch.set_float32_matmul_precision("highest")  # of the references
    matrix, dense = draw(problem, problem.n, library.device, zeros=False)
    truth, unit = reference(matrix, dense)
    cases = [
        make_case(library, "random numbers", problem._replace(n=n), matrix, dense, truth, unit)
        for n in dict.fromkeys([problem.n, bucket_start(problem.n)])
    ]
    matrix, dense = draw(problem, problem.n, library.device, zeros=True)
    cases.append(make_case(library, "zeros", problem, matrix, dense, *reference(matrix, dense)))
    return cases


def make_case(
    library: Library, name: str, problem: GemmProblem, matrix: Tensor, dense: Tensor, truth: Tensor, unit: Tensor
) -> Case:
    """The case of the first n columns of the dense operand. It allows twice the error of dense math, plus one unit."""

    def laid_out(product: Tensor) -> Tensor:  # as the result is: comparing two layouts takes several times as long
        product = product[:, : problem.n]
        return (product.t() if problem.transposed else product).contiguous()

    name, compressed = f"{name}, n = {problem.n}", library.compress(matrix)
    # In the memory layout of `dense`.
    dense = dense[:, : problem.n].contiguous() if dense.is_contiguous() else dense.t()[: problem.n].t()
    case = Case(name, problem, matrix, compressed, dense, laid_out(truth), laid_out(unit))
    error = case.error(accurate_dense(library, case))
    if not error <= MOST_DENSE_ERROR:
        raise Rejected(f"the dense result is off by {error:.3g} units on {case.name}")
    return case._replace(allowed=2 * error + 1)


def accurate_dense(library: Library, case: Case) -> Tensor:
    """Dense math with fp32 sums, to measure errors by; timed runs have the settings of training."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_fp16_reduced_precision_reduction, settings.allow_bf16_reduced_precision_reduction
    settings.allow_fp16_reduced_precision_reduction = settings.allow_bf16_reduced_precision_reduction = False
    try:
        return library.dense(case.matrix, case.dense, case.problem)
    finally:
        settings.allow_fp16_reduced_precision_reduction, settings.allow_bf16_reduced_precision_reduction = before


def poisoned(call: Callable[[], Tensor], case: Case) -> Tensor:
    """Run a GEMM whose result memory holds NaN, so that elements it does not write are seen."""
    n = case.problem.n + -case.problem.n % MULTIPLE
    garbage = torch.full((case.problem.m * n,), math.nan, dtype=case.problem.dtype, device=case.dense.device)
    del garbage  # the allocator reuses the last freed block, and in the mode below torch fills new memory as well
    torch.set_deterministic_debug_mode("warn")
    try:
        return call()
    finally:
        torch.set_deterministic_debug_mode("default")


def check(case: Case, result: Tensor, of: str = "") -> None:
    shape = (case.problem.n, case.problem.m) if case.problem.transposed else (case.problem.m, case.problem.n)
    if result.shape != shape or result.dtype != case.problem.dtype or not result.is_contiguous():
        raise Rejected(f"the result is {tuple(result.shape)} {result.dtype}, not {shape} {case.problem.dtype}")
    error = case.error(result)
    if not error <= case.allowed:
        raise Rejected(f"wrong numbers on {case.name}{of}: off by {error:.3g} units, {case.allowed:.3g} allowed")


def check_bits(case: Case, result: Tensor, first: Tensor, algorithm: Algorithm, of: str = "") -> None:
    """Reject other bits than those of the first run. Split-k sums in any order, but must be accurate."""
    if algorithm.split_k != 1:
        check(case, result, of)
    elif not torch.equal(result.view(torch.int16), first.view(torch.int16)):
        raise Rejected(f"other bits from the same inputs on {case.name}{of}")


def check_bias(library: Library, case: Case, algorithm: Algorithm) -> None:
    """Reject a wrong bias: the algorithm itself adds it."""
    bias = torch.linspace(-4, 4, case.problem.m, device=case.dense.device).to(case.problem.dtype)
    column = bias.float()  # of the transposed result
    half_eps = torch.finfo(bias.dtype).eps / 2
    biased = case._replace(truth=case.truth + column, unit=case.unit + half_eps * column.abs())
    check(biased, library.matmul(case.compressed, case.dense, case.problem, algorithm, bias), " with a bias")


def try_candidate(library: Library, cases: list[Case], algorithm: Algorithm, final: bool) -> tuple[float, float]:
    """Microseconds that the sparse GEMM takes, and the dense one.

    Args:
        final: check all inputs, and take 15 samples or, of small GEMMs, up to 75; otherwise the first, and three.

    Raises:
        Rejected: a result is wrong, or a time is impossible.
        RuntimeError: the library refuses the call, or no CUDA graph takes it.
    """

    def sparse(case: Case) -> Tensor:
        return library.matmul(case.compressed, case.dense, case.problem, algorithm)

    timed = cases[0]
    for case in reversed(cases if final else [timed]):  # the timed one last
        expected = poisoned(partial(sparse, case), case)
        check(case, expected)
        check_bits(case, poisoned(partial(sparse, case), case), expected, algorithm)
    if timed.problem.transposed:
        check_bias(library, timed, algorithm)
    sample_sparse = library.sampler(partial(sparse, timed))
    sample_dense = library.sampler(partial(library.dense, timed.matrix, timed.dense, timed.problem))
    sparse_us: list[float] = []
    dense_us: list[float] = []
    rounds = 3
    while len(sparse_us) < rounds:
        (us, result), (dense, _) = sample_sparse(), sample_dense()
        check_bits(timed, result, expected, algorithm, " while timed")
        sparse_us.append(us)
        dense_us.append(dense)
        if final:  # small GEMMs are noisier, and cheap to repeat
            rounds = 3 * min(25, max(5, int(1e5 / max(1.0, sparse_us[0] + dense_us[0]))))
    us, dense = statistics.median(sparse_us), statistics.median(dense_us)
    if not us > 0 or not dense > 0:
        raise Rejected(f"{us:.3g} us, and {dense:.3g} us for dense, cannot be")
    return us, dense
