"""What is checked of an algorithm before its time counts; a CPU stands in for the library."""

from types import SimpleNamespace

import cslt
import pytest
import torch
from sparse24_kernels.gemm import GemmProblem, measure
from sparse24_kernels.gemm.measure import prepare, try_algorithm
from sparse24_kernels.gemm.problem import bucket_start

CPU = torch.device("cpu")
SMALL = GemmProblem(32, 48, 64, torch.bfloat16, True)


class Library(cslt.StandIn):
    """Right unless told otherwise: `tamper` gets the result `[m, n]` in fp32, its n, and the number of the call."""

    def __init__(self, monkeypatch, tamper=lambda right, n, call: right, times=(50.0, 100.0)):
        super().__init__()
        self.tamper, self.times, self.calls = tamper, list(times), 0
        monkeypatch.setattr(torch, "_cslt_compress", self.compress)
        monkeypatch.setattr(torch, "_cslt_sparse_mm", self.matmul)
        monkeypatch.setattr(measure, "sampler", self.sampler)
        monkeypatch.setattr(measure, "host_us", lambda call, device: 7.0)

    def matmul(self, compressed, dense, bias=None, *, transpose_result=False, **_):
        self.calls += 1
        right = super().matmul(compressed, dense, bias, transpose_result=transpose_result)
        n = 33 if dense.shape[1] == 48 and not dense[:, 33:].any() else dense.shape[1]
        result = self.tamper((right.t() if transpose_result else right).float(), n, self.calls).to(dense.dtype)
        return self.laid_out(result, transpose_result)

    def laid_out(self, result, transposed):
        return (result.t() if transposed else result).contiguous()

    def sampler(self, call):
        us = self.times.pop(0)  # the sparse one is asked for first
        return lambda: (us, call())


def attempt(problem=SMALL):
    return try_algorithm(prepare(problem, CPU), 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("m, n, k", [(32, 48, 64), (16, 16, 4096), (48, 192, 512)])
def test_a_right_library_passes(dtype, transposed, m, n, k, monkeypatch):
    Library(monkeypatch)
    cases = prepare(GemmProblem(m, n, k, dtype, transposed), CPU)
    assert try_algorithm(cases, 0) == (50.0, 100.0, 7.0)
    assert [case.problem.n for case in cases] == list(dict.fromkeys([n, bucket_start(n)]))
    assert cases[0].dense.t().is_contiguous() is transposed
    for case in cases:
        assert ((case.by_dense() - case.truth).abs() <= case.allowed * (1.5 / measure.MOST_ERROR)).all()
    assert (cases[0].matrix == 0).all(1).any() and (cases[0].truth == 0).any()


def one_element(value):
    def tamper(right, n, call):
        right = right.clone()
        right[3, 2] = value
        return right

    return tamper


@pytest.mark.parametrize(
    "tamper",
    [
        lambda right, n, call: right * 1.02,
        lambda right, n, call: right.roll(1, 0),
        lambda right, n, call: torch.zeros_like(right),
        one_element(float("nan")),
        one_element(float("inf")),
        one_element(1e4),
        lambda right, n, call: right if n != 33 else right * 2,  # wrong at the start of the bucket
        lambda right, n, call: right if n != 48 else right * 2,  # and at its end
    ],
)
def test_wrong_numbers_are_rejected(tamper, monkeypatch):
    Library(monkeypatch, tamper)
    with pytest.raises(RuntimeError, match="wrong numbers"):
        attempt()


def test_a_bias_that_is_lost_shows(monkeypatch):
    class Deaf(Library):
        def matmul(self, compressed, dense, bias=None, **options):
            return super().matmul(compressed, dense, **options)

    Deaf(monkeypatch)
    with pytest.raises(RuntimeError, match="n = 33, with a bias"):
        attempt()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_lost_term_shows(dtype, monkeypatch):
    Library(monkeypatch)
    cases = prepare(GemmProblem(64, 256, 4096, dtype, True), CPU)
    lost = cases[0].dense.clone()
    lost[-1] = 0
    with pytest.raises(RuntimeError, match="wrong numbers"):
        measure.check([cases[0]._replace(dense=lost)], 0)


def test_other_bits_are_rejected(monkeypatch):
    Library(monkeypatch, lambda right, n, call: right if call < 7 else right * 1.5)  # after the checks
    with pytest.raises(RuntimeError, match="other bits from the same inputs"):
        attempt()


def test_a_result_that_is_not_written_or_lies_otherwise_is_rejected(monkeypatch):
    """Unwritten memory would otherwise be the result of the last call."""

    class Idle(Library):
        def laid_out(self, result, transposed):
            return torch.empty(result.shape[::-1] if transposed else result.shape, dtype=result.dtype)

    class Flipped(Library):
        def laid_out(self, result, transposed):
            return super().laid_out(result, transposed).t()

    Idle(monkeypatch)
    with pytest.raises(RuntimeError, match="wrong numbers in 1056 of 1056"):
        attempt()
    assert not torch.are_deterministic_algorithms_enabled()
    Flipped(monkeypatch)
    with pytest.raises(RuntimeError, match="wrong numbers"):
        attempt(GemmProblem(48, 48, 64, torch.float16, False))


@pytest.mark.parametrize("times", [(0.0, 100.0), (-1.0, 100.0), (float("nan"), 100.0), (5.0, 0)])
def test_impossible_times_are_rejected(times, monkeypatch):
    Library(monkeypatch, times=times)
    with pytest.raises(RuntimeError, match="cannot be"):
        attempt()


def test_a_replay_overwrites_its_result(monkeypatch):
    monkeypatch.setattr(measure, "elapsed", lambda run: run() is None or 7.0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=0))
    memory = torch.ones(4)
    monkeypatch.setattr(measure, "capture", lambda call: (lambda: memory.copy_(call()), memory))
    us, result = measure.sampler(lambda: torch.full((4,), 5.0))()
    assert us == 7.0 and (result == 5).all()
    monkeypatch.setattr(measure, "capture", lambda call: (lambda: 0, memory))  # one that does nothing
    assert measure.sampler(lambda: memory)()[1].isnan().all()


@pytest.mark.gpu
def test_on_a_gpu():
    a = torch.randn(1024, 1024, device="cuda")
    us, result = measure.sampler(lambda: a @ a)()
    assert torch.equal(result, a @ a) and 0 < us < 1e4
    assert 0 < measure.host_us(lambda: a @ a, a.device) < 1e4
