"""Is an algorithm right, and how fast is it? What `worker.py` runs for each candidate, in a process of its own.

Nothing is believed. Memory is filled with NaN before each product, so that an algorithm which returns without running
cannot show an old result; every product is compared with fp32, also at the smallest and the largest n of the bucket
that a verdict will serve; and without split-k the same inputs must give the same bits, each time, timed or not:
some algorithms are wrong only now and then (pytorch issue 155333).
"""

import itertools
import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import cusparselt
from ..cusparselt import MULTIPLE, Algorithm, Problem
from .records import Environment, bucket, bucket_start, current_environment

MOST_DENSE_ERROR = 8.0
"""In the units of `Case.error`. A dense product that is further off cannot serve as the measure of others."""


class Rejected(Exception):
    """The algorithm failed. `deny`: it is not to be trusted with other sizes either."""

    def __init__(self, why: str, deny: bool):
        super().__init__(why)
        self.deny = deny


class Library:
    """The operations that a candidate is made of. Tests put another in its place."""

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # events belong to the current device

    def environment(self) -> Environment:
        return current_environment(self.device)

    def last_id(self) -> int | None:
        return torch.backends.cusparselt.get_max_alg_id()

    def compress(self, matrix: Tensor) -> Tensor:
        return cusparselt.compress(matrix)

    def matmul(
        self, compressed: Tensor, dense: Tensor, problem: Problem, algorithm: Algorithm, bias: Tensor | None = None
    ) -> Tensor:
        return cusparselt.matmul(compressed, dense, bias, problem.transposed, *algorithm)

    def dense(self, matrix: Tensor, dense: Tensor, problem: Problem) -> Tensor:
        """What would run instead: the product with the pruned matrix, into the layout that is asked for."""
        linear = torch.nn.functional.linear
        return linear(dense.t(), matrix) if problem.transposed else linear(matrix, dense.t())

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def measure(self, call: Callable[[], Tensor]) -> tuple[float, Tensor]:
        """Microseconds on the device, from cold caches, and the result."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(4):  # also keeps the device busy while Python and the library prepare the launch
            self._flush.zero_()
        start.record()
        result = call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000, result

    @property
    def _flush(self) -> Tensor:
        if not hasattr(self, "_buffer"):
            cache = torch.cuda.get_device_properties(self.device).L2_cache_size
            self._buffer = torch.empty(max(4 * cache, 1 << 26), dtype=torch.uint8, device=self.device)
        return self._buffer

    def peak(self) -> float:
        """Operations per second that the device cannot exceed, counting the zeros as the dense product does."""
        about = torch.cuda.get_device_properties(self.device)
        # 16-bit sparse operations per clock and multiprocessor: Ampere, Ada; Hopper; Blackwell, and beyond as a guess.
        per_clock = {8: 4096, 9: 8192}.get(about.major, 16384)
        hertz = getattr(about, "clock_rate", 0) * 1000 or 3e9  # kHz; releases that do not tell get a clock none reaches
        return per_clock * about.multi_processor_count * hertz


class Case(NamedTuple):
    """One input of a problem, and what is right for it. Values are `scale` times those that `truth` was made of."""

    name: str
    problem: Problem
    matrix: Tensor
    compressed: Tensor
    dense: Tensor
    truth: Tensor
    unit: Tensor
    scale: float
    allowed: float

    def error(self, result: Tensor) -> float:
        """The largest error of a result, in units of what rounding and summing in fp32 can do to each element."""
        result = result.t() if self.problem.transposed else result
        return float(((result.float() / self.scale**2 - self.truth).abs() / self.unit).max())


def reference(matrix: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
    """The product in fp32, and the unit that errors are measured in: `u |ab| + 2^-23 sqrt(k) |a||b|`.

    The first term is the rounding of the result to its dtype (u is half its eps). The second is what fp32 sums of k
    terms in another order, or truncated as tensor cores do, differ by; it is the larger one only where terms cancel.
    """
    wide, about = matrix.float(), torch.finfo(matrix.dtype)
    truth = wide @ dense.float()
    sizes = wide.abs_() @ dense.float().abs_()
    floor = max(about.smallest_normal * about.eps, 1e-37)
    unit = sizes.mul_(2**-23 * math.sqrt(matrix.shape[1])).add_(truth.abs(), alpha=about.eps / 2).add_(floor)
    return truth, unit


def draw(problem: Problem, n: int, device: torch.device, zeros: bool) -> tuple[Tensor, Tensor]:
    """A 2:4 matrix of all six patterns and a dense operand; `zeros`: with empty rows, columns and half-empty groups."""
    generator = torch.Generator(device).manual_seed(n + zeros)

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, device=device, dtype=problem.dtype)

    m, k = problem.m, problem.k
    pairs = [[place in pair for place in range(4)] for pair in itertools.combinations(range(4), 2)]
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
    """`dense[:, :n]` in the layout of `dense`."""
    return dense[:, :n].contiguous() if dense.is_contiguous() else dense.t()[:n].t()


def prepare(library: Library, problem: Problem) -> list[Case]:
    """The inputs; the first is also the one that is timed.

    Raises:
        Rejected: the dense product itself is off.
    """
    settings, cases = torch.backends.cuda.matmul, []
    before = settings.allow_fp16_reduced_precision_reduction, settings.allow_bf16_reduced_precision_reduction
    # For the measure of errors only: what is timed runs as it does in training.
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
            truth[:, :n],
            unit[:, :n],
            scale,
            0.0,
        )
        error = case.error(library.dense(matrix, dense, case.problem))
        if not error <= MOST_DENSE_ERROR:
            raise Rejected(f"the dense product is off by {error:.3g} units on {case.name}", deny=False)
        cases.append(case._replace(allowed=2 * error + 1))

    try:
        matrix, dense = draw(problem, largest, library.device, zeros=False)
        truth, unit = reference(matrix, dense)
        for n in dict.fromkeys([problem.n, bucket_start(problem.n), largest]):
            add("random numbers", matrix, dense, n, truth, unit)
        # A power of two changes no digit of the right result, so this one needs no reference of its own.
        room = torch.finfo(problem.dtype).max / 4 / max(1.0, float(truth.abs().max()))
        scale = 2.0 ** max(0, math.floor(math.log2(room) / 2))
        add("large numbers", matrix, dense, problem.n, truth, unit, scale)
        matrix, dense = draw(problem, problem.n, library.device, zeros=True)
        add("zeros", matrix, dense, problem.n, *reference(matrix, dense))
    finally:
        settings.allow_fp16_reduced_precision_reduction, settings.allow_bf16_reduced_precision_reduction = before
    return cases


def poisoned(call: Callable[[], Tensor], case: Case) -> Tensor:
    """Run a product where the memory it gets holds NaN: what it does not write shows."""
    n = case.problem.n + -case.problem.n % MULTIPLE
    garbage = torch.full((case.problem.m * n,), math.nan, dtype=case.problem.dtype, device=case.dense.device)
    del garbage  # the allocator hands out again what it got back last; in the mode below torch fills that as well
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
    """Without split-k, the bits of the first run; sums that split k may end in any order, but must be right."""
    if algorithm.split_k != 1:
        check(case, result, of)
    elif not torch.equal(result.view(torch.int16), first.view(torch.int16)):
        raise Rejected(f"other bits from the same inputs on {case.name}{of}", deny=True)


def check_bias(library: Library, case: Case, algorithm: Algorithm) -> None:
    """The bias is added by the algorithm itself, so it is part of what may be wrong."""
    bias = torch.linspace(-4, 4, case.problem.m, device=case.dense.device).to(case.problem.dtype)
    column = bias.float()[:, None]
    half_eps = torch.finfo(bias.dtype).eps / 2
    biased = case._replace(truth=case.truth + column, unit=case.unit + half_eps * column.abs())
    check(biased, library.matmul(case.compressed, case.dense, case.problem, algorithm, bias), " with a bias")


def try_candidate(library: Library, cases: list[Case], algorithm: Algorithm, effort: int) -> tuple[float, float]:
    """Microseconds of the sparse product and of the dense one.

    Raises:
        Rejected: its numbers are wrong, or its time cannot be.
    """

    def sparse(case: Case) -> Tensor:
        return library.matmul(case.compressed, case.dense, case.problem, algorithm)

    timed = cases[0]
    for case in cases:
        first = poisoned(lambda case=case: sparse(case), case)
        check(case, first)
        check_bits(case, poisoned(lambda case=case: sparse(case), case), first, algorithm)
        if case is timed:
            expected = first
    if timed.problem.transposed:
        check_bias(library, timed, algorithm)
    sparse_us, dense_us = [], []
    rounds = 5 * effort
    while len(sparse_us) < rounds:
        us, result = library.measure(lambda: sparse(timed))
        check_bits(timed, result, expected, algorithm, " while timed")
        del result
        sparse_us.append(us)
        dense_us.append(library.measure(lambda: library.dense(timed.matrix, timed.dense, timed.problem))[0])
        if len(sparse_us) == 1:  # small products are noisier and cost nothing to repeat
            rounds = effort * min(25, max(5, int(1e5 / max(1.0, sparse_us[0] + dense_us[0]))))
    us, dense = statistics.median(sparse_us), statistics.median(dense_us)
    fastest = 2e6 * timed.problem.m * timed.problem.n * timed.problem.k / (1.1 * library.peak())
    if not us > fastest or not dense > 0:
        raise Rejected(f"{us:.3g} us, and {dense:.3g} us for dense, cannot be: at least {fastest:.3g} us", deny=False)
    return us, dense
