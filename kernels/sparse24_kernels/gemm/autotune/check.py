"""The check and the timing of an algorithm, which `worker.py` runs for each candidate.

Memory is filled with NaN before each GEMM, so an algorithm that returns without running cannot show an old result.
Every result is compared with fp32, also at the smallest and the largest n of the bucket that the verdict is for.
Without split-k, the same inputs must give the same bits every time, in timed runs too: some algorithms are wrong only
occasionally (pytorch issue 155333).
"""

import itertools
import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import cusparselt
from ..cusparselt import MULTIPLE
from ..problem import Algorithm, GemmProblem
from .records import Environment, bucket, bucket_start, current_environment
from .timing import NotCaptured, Sample, sampler

MOST_DENSE_ERROR = 8.0
"""In the units of `Case.error`. A dense result that is less accurate cannot be the reference for sparse ones."""


class Rejected(Exception):
    """The algorithm failed. `deny`: it must not be tried or used again in this bucket."""

    def __init__(self, reason: str, deny: bool):
        super().__init__(reason)
        self.deny = deny


class Library:
    """The operations that a check needs from the device and cuSPARSELt."""

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # events belong to the current device

    def environment(self) -> Environment:
        return current_environment(self.device)

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

    @property
    def _flush(self) -> Tensor:
        if not hasattr(self, "_buffer"):
            cache = torch.cuda.get_device_properties(self.device).L2_cache_size
            self._buffer = torch.empty(max(4 * cache, 1 << 26), dtype=torch.uint8, device=self.device)
        return self._buffer


class Case(NamedTuple):
    """One input of a problem, and its correct result in the layout of the GEMM's. The input is `scale` times that of
    `truth`."""

    name: str
    problem: GemmProblem
    matrix: Tensor
    compressed: Tensor
    dense: Tensor
    truth: Tensor
    unit: Tensor
    scale: float
    allowed: float

    def error(self, result: Tensor) -> float:
        """The largest error of a result, in units of the error that rounding and fp32 sums can cause per element."""
        return float(((result.float() / self.scale**2 - self.truth).abs() / self.unit).max())


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
    """A 2:4 matrix with all six patterns, and a dense operand. `zeros`: with empty rows, columns, half-empty groups."""
    generator = torch.Generator(device).manual_seed(n + zeros)

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, device=device, dtype=problem.dtype)

    m, k = problem.m, problem.k
    pairs = [[i in pair for i in range(4)] for pair in itertools.combinations(range(4), 2)]
    which = torch.randint(6, (m, k // 4), generator=generator, device=device)
    matrix = normal(m, k).masked_fill_(~torch.tensor(pairs, device=device)[which].view(m, k), 0.0)  # 0.0, never -0.0
    dense = normal(n, k).t() if problem.dense_is_column_major else normal(k, n)
    if zeros:
        matrix[::3] = 0
        matrix[:, ::4] = 0
        dense[:, ::5] = 0
        dense[::2] = 0
    return matrix, dense


def first_columns(dense: Tensor, n: int) -> Tensor:
    """`dense[:, :n]` in the memory layout of `dense`."""
    return dense[:, :n].contiguous() if dense.is_contiguous() else dense.t()[:n].t()


def laid_out(product: Tensor, problem: GemmProblem) -> Tensor:
    """`[m, n]` in the layout of the problem's result: comparing tensors of two layouts takes several times as long."""
    return (product.t() if problem.transposed else product).contiguous()


def prepare(library: Library, problem: GemmProblem) -> list[Case]:
    """The inputs that a problem's algorithms are checked on. The first one is also timed.

    Raises:
        Rejected: dense math itself is inaccurate.
    """
    settings, cases = torch.backends.cuda.matmul, []
    before = settings.allow_fp16_reduced_precision_reduction, settings.allow_bf16_reduced_precision_reduction
    # For the reference of errors only: timed runs have the settings of training.
    settings.allow_fp16_reduced_precision_reduction = settings.allow_bf16_reduced_precision_reduction = False
    torch.set_float32_matmul_precision("highest")
    largest = max(bucket(problem.n), problem.n)

    def add(name: str, matrix: Tensor, dense: Tensor, n: int, truth: Tensor, unit: Tensor, scale: float = 1.0) -> None:
        matrix, dense = matrix * scale, first_columns(dense, n) * scale
        case = Case(
            f"{name}, n = {n}",
            problem._replace(n=n),
            matrix,
            library.compress(matrix),
            dense,
            laid_out(truth[:, :n], problem),
            laid_out(unit[:, :n], problem),
            scale,
            0.0,
        )
        error = case.error(library.dense(matrix, dense, case.problem))
        if not error <= MOST_DENSE_ERROR:
            raise Rejected(f"the dense result is off by {error:.3g} units on {case.name}", deny=False)
        cases.append(case._replace(allowed=2 * error + 1))

    try:
        matrix, dense = draw(problem, largest, library.device, zeros=False)
        truth, unit = reference(matrix, dense)
        for n in dict.fromkeys([problem.n, bucket_start(problem.n), largest]):
            add("random numbers", matrix, dense, n, truth, unit)
        # A power of two changes no digit of the correct result, so this input needs no reference of its own.
        headroom = torch.finfo(problem.dtype).max / 4 / max(1.0, float(truth.abs().max()))
        scale = 2.0 ** max(0, math.floor(math.log2(headroom) / 2))
        add("large numbers", matrix, dense, problem.n, truth, unit, scale)
        matrix, dense = draw(problem, problem.n, library.device, zeros=True)
        add("zeros", matrix, dense, problem.n, *reference(matrix, dense))
    finally:
        settings.allow_fp16_reduced_precision_reduction, settings.allow_bf16_reduced_precision_reduction = before
    return cases


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
        raise Rejected(
            f"the result is {tuple(result.shape)} {result.dtype}, not {shape} {case.problem.dtype}", deny=True
        )
    error = case.error(result)
    if not error <= case.allowed:
        raise Rejected(
            f"wrong numbers on {case.name}{of}: off by {error:.3g} units, {case.allowed:.3g} allowed", deny=True
        )


def check_bits(case: Case, result: Tensor, first: Tensor, algorithm: Algorithm, of: str = "") -> None:
    """Reject other bits than those of the first run. Split-k sums in any order, but must be accurate."""
    if algorithm.split_k != 1:
        check(case, result, of)
    elif not torch.equal(result.view(torch.int16), first.view(torch.int16)):
        raise Rejected(f"other bits from the same inputs on {case.name}{of}", deny=True)


def check_bias(library: Library, case: Case, algorithm: Algorithm) -> None:
    """Reject a wrong bias: the algorithm itself adds it."""
    bias = torch.linspace(-4, 4, case.problem.m, device=case.dense.device).to(case.problem.dtype)
    column = bias.float()  # of the transposed result
    half_eps = torch.finfo(bias.dtype).eps / 2
    biased = case._replace(truth=case.truth + column, unit=case.unit + half_eps * column.abs())
    check(biased, library.matmul(case.compressed, case.dense, case.problem, algorithm, bias), " with a bias")


def try_candidate(library: Library, cases: list[Case], algorithm: Algorithm, effort: int) -> tuple[float, float]:
    """Microseconds that the sparse GEMM takes, and the dense one.

    Args:
        effort: 0 screens, with the first input and three samples; otherwise all inputs, and samples in proportion.

    Raises:
        Rejected: a result is wrong, or a time is impossible.
    """

    def sparse(case: Case) -> Callable[[], Tensor]:
        return lambda: library.matmul(case.compressed, case.dense, case.problem, algorithm)

    timed = cases[0]
    for case in cases if effort else [timed]:
        first = poisoned(sparse(case), case)
        check(case, first)
        check_bits(case, poisoned(sparse(case), case), first, algorithm)
        if case is timed:
            expected = first
    if timed.problem.transposed:
        check_bias(library, timed, algorithm)
    sparse_us: list[float] = []
    dense_us: list[float] = []
    try:
        sample_sparse = library.sampler(sparse(timed))
        sample_dense = library.sampler(lambda: library.dense(timed.matrix, timed.dense, timed.problem))
    except NotCaptured as error:
        raise Rejected(str(error), deny=False) from None
    rounds = 5 * effort or 3
    while len(sparse_us) < rounds:
        (us, result), (dense, _) = sample_sparse(), sample_dense()
        check_bits(timed, result, expected, algorithm, " while timed")
        sparse_us.append(us)
        dense_us.append(dense)
        if effort and len(sparse_us) == 1:  # small GEMMs are noisier, and cheap to repeat
            rounds = effort * min(25, max(5, int(1e5 / max(1.0, sparse_us[0] + dense_us[0]))))
    us, dense = statistics.median(sparse_us), statistics.median(dense_us)
    if not us > 0 or not dense > 0:
        raise Rejected(f"{us:.3g} us, and {dense:.3g} us for dense, cannot be", deny=False)
    return us, dense
