"""What a worker checks before it believes in a number or a time; a CPU stands in for the library."""

import sys

import pytest
import torch
from autotune_stage import CPU, HERE, PROBLEM, tune
from sparse24_kernels import GemmProblem
from sparse24_kernels.gemm import autotune
from sparse24_kernels.gemm.autotune import check as autotune_check
from sparse24_kernels.gemm.autotune import search as autotune_search
from sparse24_kernels.gemm.autotune import table as autotune_table
from sparse24_kernels.gemm.autotune import worker as autotune_worker
from sparse24_kernels.gemm.autotune.table import bucket_start
from sparse24_kernels.gemm.problem import Algorithm

pytestmark = pytest.mark.usefixtures("autotune_stage")


SMALL = GemmProblem(32, 48, 64, torch.bfloat16, True, True)
PLAIN = Algorithm()


class CpuLibrary(autotune_check.Library):
    """Right, and twice as fast as dense, unless told otherwise by what follows."""

    def compress(self, matrix):
        return matrix.clone()

    def matmul(self, compressed, dense, problem, algorithm, bias=None):
        return self.laid_out(compressed.float() @ dense.float(), problem, bias)

    def laid_out(self, product, problem, bias=None):
        product = product if bias is None else product + bias.float()[:, None]
        return (product.t() if problem.transposed else product).to(problem.dtype).contiguous()

    def synchronize(self):
        pass

    def sampler(self, call):
        self.is_sparse = not getattr(self, "is_sparse", False)  # the sparse one is asked for first
        us = 50.0 if self.is_sparse else 100.0
        return lambda: (us, call())


def attempt(library, problem=SMALL, algorithm=PLAIN):
    return autotune_check.try_candidate(library, autotune_check.prepare(library, problem), algorithm, True)


every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@every_dtype
@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("m, n, k", [(32, 48, 64), (16, 16, 4096), (48, 192, 512)])
def test_a_right_library_passes(dtype, column_major, transposed, m, n, k):
    library = CpuLibrary(CPU)
    problem = GemmProblem(m, n, k, dtype, column_major, transposed)
    assert attempt(library, problem) == (50.0, 100.0)
    cases = autotune_check.prepare(library, problem)
    assert {case.problem.n for case in cases} == {n, bucket_start(n)}
    for case in cases:
        groups = case.matrix.view(m, -1, 4)
        assert ((groups != 0).sum(-1) <= 2).all()
        assert not (torch.signbit(groups) & (groups == 0)).any()
        if case.problem.n > 1:
            assert case.dense.is_contiguous() is not column_major and (case.dense.t().is_contiguous() is column_major)
        assert case.error(library.dense(case.matrix, case.dense, case.problem)) <= 1.5
    zeros = cases[-1]
    assert (zeros.matrix == 0).all(1).any() and (zeros.dense == 0).all(0).any() and (zeros.truth == 0).any()


class Tampered(CpuLibrary):
    """`tamper(right result in fp32 [m, n], problem, number of the call)`."""

    def __init__(self, tamper, from_call=0):
        super().__init__(CPU)
        self.tamper, self.from_call, self.calls = tamper, from_call, 0

    def matmul(self, compressed, dense, problem, algorithm, bias=None):
        right = compressed.float() @ dense.float()
        self.calls += 1
        if self.calls <= self.from_call:
            return self.laid_out(right, problem, bias)
        return self.laid_out(self.tamper(right, problem, self.calls), problem, bias)


def one_element(value):
    def tamper(right, problem, call):
        right[3, 0] = value
        return right

    return tamper


@pytest.mark.parametrize(
    "tamper",
    [
        lambda right, problem, call: right * 1.02,
        lambda right, problem, call: right + 0.3,
        lambda right, problem, call: right.roll(1, 0),
        lambda right, problem, call: -right,
        lambda right, problem, call: torch.zeros_like(right),
        one_element(float("nan")),
        one_element(float("inf")),
        one_element(1e4),
        lambda right, problem, call: right if problem.n != 33 else right * 2,  # wrong at the start of the bucket
        lambda right, problem, call: right if problem.n != 48 else right * 2,  # and at its end
    ],
)
def test_wrong_numbers_are_rejected(tamper):
    with pytest.raises(autotune_check.Rejected, match="wrong numbers"):
        attempt(Tampered(tamper))


def test_a_bias_that_is_lost_shows():
    class Deaf(CpuLibrary):
        def matmul(self, compressed, dense, problem, algorithm, bias=None):
            return super().matmul(compressed, dense, problem, algorithm)

    with pytest.raises(autotune_check.Rejected, match=r"wrong numbers on .* with a bias"):
        attempt(Deaf(CPU))


@every_dtype
def test_one_lost_term_shows(dtype):
    class Forgetful(CpuLibrary):
        def matmul(self, compressed, dense, problem, algorithm, bias=None):
            return self.laid_out(compressed[:, :-1].float() @ dense[:-1].float(), problem, bias)

    with pytest.raises(autotune_check.Rejected, match="wrong numbers"):
        attempt(Forgetful(CPU), GemmProblem(64, 256, 4096, dtype, True, True))


@every_dtype
def test_sums_in_low_precision_are_rejected(dtype):
    """Split-k that adds its parts in the operands' dtype is less accurate than dense math."""

    class Coarse(CpuLibrary):
        def matmul(self, compressed, dense, problem, algorithm, bias=None):
            parts = zip(compressed.float().chunk(8, 1), dense.float().chunk(8, 0))
            return self.laid_out(sum((a @ b).to(dtype) for a, b in parts), problem, bias)

    with pytest.raises(autotune_check.Rejected, match="wrong numbers"):
        attempt(Coarse(CPU), GemmProblem(64, 256, 1024, dtype, True, True), Algorithm(0, 8))


def test_another_order_of_sums_passes():
    class Shuffled(CpuLibrary):
        def matmul(self, compressed, dense, problem, algorithm, bias=None):
            order = torch.randperm(problem.k)
            return self.laid_out(compressed[:, order].float() @ dense[order].float(), problem, bias)

    problem = GemmProblem(64, 256, 1024, torch.bfloat16, True, True)
    assert attempt(Shuffled(CPU), problem, Algorithm(0, 2)) == (50.0, 100.0)
    with pytest.raises(autotune_check.Rejected, match="other bits from the same inputs"):
        attempt(Shuffled(CPU), problem, Algorithm(0, 1))


@pytest.mark.parametrize("split_k, reason", [(1, "other bits .* while timed"), (2, "wrong numbers .* while timed")])
def test_wrong_now_and_then(split_k, reason):
    """The checks before the timing pass; the timed runs are looked at as well."""
    library = Tampered(lambda right, problem, call: right if call % 7 else right * 1.5, from_call=10)
    with pytest.raises(autotune_check.Rejected, match=reason):
        attempt(library, GemmProblem(32, 48, 64, torch.bfloat16, True, True), Algorithm(0, split_k))


def test_returning_without_running_is_seen():
    """It returns unwritten memory, which without the NaN in it would be the dense result."""

    class Idle(CpuLibrary):
        def matmul(self, compressed, dense, problem, algorithm, bias=None):
            shape = (problem.n, problem.m) if problem.transposed else (problem.m, problem.n)
            return torch.empty(shape, dtype=problem.dtype)

    with pytest.raises(autotune_check.Rejected, match="off by nan"):
        attempt(Idle(CPU))
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_result_of_another_shape_or_layout_is_rejected():
    class Flipped(CpuLibrary):
        def laid_out(self, product, problem, bias=None):
            return super().laid_out(product, problem).t()

    for transposed in (False, True):
        with pytest.raises(autotune_check.Rejected, match="the result is"):
            attempt(Flipped(CPU), GemmProblem(48, 48, 64, torch.float16, True, transposed))


@pytest.mark.parametrize("sparse_us, dense_us", [(0.0, 100.0), (-1.0, 100.0), (float("nan"), 100.0), (5.0, 0)])
def test_impossible_times_are_rejected(sparse_us, dense_us):
    library = CpuLibrary(CPU)
    times = [sparse_us, dense_us]
    library.sampler = lambda call: lambda: (times.append(times.pop(0)) or times[-1], call())
    with pytest.raises(autotune_check.Rejected, match="cannot be"):
        attempt(library)


def test_a_dense_result_that_is_off_is_no_measure():
    library = CpuLibrary(CPU)
    library.dense = lambda matrix, dense, problem: library.laid_out(matrix.float() @ dense.float() * 1.1, problem)
    with pytest.raises(autotune_check.Rejected, match="dense result is off"):
        attempt(library)


LIAR = """
import os, sys
from multiprocessing.connection import Connection
import torch
from sparse24_kernels.gemm.autotune import worker
from sparse24_kernels.gemm.autotune.check import Library

class Liar(Library):
    def last_id(self): return 6
    def compress(self, matrix): return matrix.clone()
    def synchronize(self): pass
    def sampler(self, call):
        def sample():
            self.id = None
            result = call()
            return {None: 100.0, 0: 90.0, 2: 0.0, 6: 80.0}.get(self.id, 10.0), result
        return sample
    def matmul(self, compressed, dense, problem, algorithm, bias=None):
        self.id = algorithm.id
        if self.id == 4 or algorithm.split_k != 1: raise RuntimeError("not supported\\nmore")
        right = dense.t().float() @ compressed.t().float()
        right = (right if bias is None else right + bias.float()).to(problem.dtype)
        if self.id == 1: return right * 1.5
        if self.id == 3: return torch.empty_like(right)
        if self.id == 5: return right * (1 + 1e-2 * torch.rand(()).to(right.dtype))
        print("Python prints this")
        os.write(1, b"the library prints this, and no line end")
        return right

worker.main(Connection(int(sys.argv[-1])), Liar)
"""


def test_the_worker(tmp_path, monkeypatch):
    monkeypatch.setattr(autotune_search, "CANDIDATE_SECONDS", 30)
    command = [sys.executable, "-c", LIAR]
    verdict = tune([SMALL], CPU, seconds_per_problem=60, worker=command)[SMALL]
    assert verdict[:4] == ("cusparselt", Algorithm(6), 80.0, 100.0)
    reasons = {reason.split("id=")[1][0]: reason for reason in autotune_table.read(HERE)[SMALL].failures}
    assert "wrong numbers" in reasons["1"] and "off by nan" in reasons["3"] and "5" in reasons
    assert "cannot be" in reasons["2"] and "not supported" in reasons["4"] and "more" not in reasons["4"]


def request(algorithm=None):
    return {"device": "cpu", "problem": autotune_table.problem_record(SMALL), "algorithm": algorithm, "final": True}


def test_a_refusal_is_a_reply_and_a_lost_device_ends_the_worker():
    class Refusing(CpuLibrary):
        def matmul(self, *_):
            raise RuntimeError("not supported\nin words")

    worker = autotune_worker.Worker(Refusing)
    worker.answer(request())
    assert worker.answer(request([0, 1])) == {"ok": False, "reason": "not supported"}
    worker.library.synchronize = lambda: (_ for _ in ()).throw(RuntimeError("illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        worker.answer(request([0, 1]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU the real worker cannot prepare anything")
def test_the_command_that_is_the_default(capfd):
    """It starts, and its stderr, which users see, says why it ends."""
    assert autotune.WORKER[1:] == ["-P", "-m", "sparse24_kernels.gemm.autotune.worker"]
    assert tune([PROBLEM], CPU)[PROBLEM].reason == "it ended with exit code 1"
    assert "_cslt_compress" in capfd.readouterr().err
