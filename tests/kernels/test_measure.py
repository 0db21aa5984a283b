"""What is checked of an algorithm before its time counts; a CPU stands in for the library."""

from types import SimpleNamespace

import cslt
import pytest
import torch
from sparse24_kernels.gemm import GemmProblem, measure
from sparse24_kernels.gemm.measure import Rejected, prepare, try_algorithm
from sparse24_kernels.gemm.problem import bucket_start

CPU = torch.device("cpu")
SMALL = GemmProblem(32, 48, 64, torch.bfloat16, True, True)


@pytest.fixture(autouse=True)
def _time_of_the_host(monkeypatch):
    monkeypatch.setattr(measure, "host_us", lambda call: 7.0)


class Library(cslt.StandIn):
    """Right, and twice as fast as dense, unless told otherwise: `product(matrix, dense, call)` is `[m, n]` in fp32."""

    def __init__(self, monkeypatch, product=lambda matrix, dense, call: matrix.float() @ dense.float()):
        super().__init__()
        self.product, self.calls, self.is_sparse, self.matrices = product, 0, False, {}
        monkeypatch.setattr(torch, "_cslt_compress", self.compress)
        monkeypatch.setattr(torch, "_cslt_sparse_mm", self.matmul)
        monkeypatch.setattr(measure, "sampler", self.sampler)

    def compress(self, matrix):
        compressed = super().compress(matrix)
        self.matrices[compressed.data_ptr()] = matrix
        return compressed

    def matmul(self, compressed, dense, bias=None, *, transpose_result=False, **_):
        self.calls += 1
        result = self.product(self.matrices[compressed.data_ptr()], dense, self.calls)
        result = result if bias is None else result + bias.float()[:, None]
        return self.laid_out(result.to(dense.dtype), transpose_result)

    def laid_out(self, result, transposed):
        return (result.t() if transposed else result).contiguous()

    def sampler(self, call):
        self.is_sparse = not self.is_sparse  # the sparse one is asked for first
        us = 50.0 if self.is_sparse else 100.0
        return lambda: (us, call())


def take_turns(monkeypatch, *times):
    """The first call that is timed takes the first of `times`, the second the second."""
    left = list(times)

    def sampler(call):
        us = left.pop(0)
        return lambda: (us, call())

    monkeypatch.setattr(measure, "sampler", sampler)


def attempt(problem=SMALL):
    return try_algorithm(prepare(problem, CPU), 0)


def tampered(tamper):
    """`tamper` is given the right result `[m, n]` in fp32, its unpadded n, and the number of the call."""

    def product(matrix, dense, call):
        n = 33 if dense.shape[1] == 48 and not dense[:, 33:].any() else dense.shape[1]
        return tamper(matrix.float() @ dense.float(), n, call)

    return product


every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@every_dtype
@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("m, n, k", [(32, 48, 64), (16, 16, 4096), (48, 192, 512)])
def test_a_right_library_passes(dtype, column_major, transposed, m, n, k, monkeypatch):
    library = cslt.StandIn()
    for name, call in (("_cslt_compress", library.compress), ("_cslt_sparse_mm", library.matmul)):
        monkeypatch.setattr(torch, name, call)
    take_turns(monkeypatch, 50.0, 100.0)
    cases = prepare(GemmProblem(m, n, k, dtype, column_major, transposed), CPU)
    assert try_algorithm(cases, 0) == (50.0, 100.0, 7.0)
    assert {case.problem.n for case in cases} == {n, bucket_start(n)}
    for case in cases:
        if case.problem.n > 1:
            assert case.dense.is_contiguous() is not column_major and (case.dense.t().is_contiguous() is column_major)
        assert case.error(case.by_dense()) <= 1.5
    zeros = cases[-1]
    assert (zeros.matrix == 0).all(1).any() and (zeros.dense == 0).all(0).any() and (zeros.truth == 0).any()


def one_element(value):
    def tamper(right, n, call):
        right[3, 0] = value
        return right

    return tamper


@pytest.mark.parametrize(
    "tamper",
    [
        lambda right, n, call: right * 1.02,
        lambda right, n, call: right + 0.3,
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
    Library(monkeypatch, tampered(tamper))
    with pytest.raises(Rejected, match="wrong numbers"):
        attempt()


def test_a_bias_that_is_lost_shows(monkeypatch):
    class Deaf(Library):
        def matmul(self, compressed, dense, bias=None, **options):
            return super().matmul(compressed, dense, **options)

    Deaf(monkeypatch)
    with pytest.raises(Rejected, match=r"wrong numbers on .* with a bias"):
        attempt()


@every_dtype
def test_one_lost_term_shows(dtype, monkeypatch):
    Library(monkeypatch, lambda matrix, dense, call: matrix[:, :-1].float() @ dense[:-1].float())
    with pytest.raises(Rejected, match="wrong numbers"):
        attempt(GemmProblem(64, 256, 4096, dtype, True, True))


def test_other_bits_are_rejected(monkeypatch):
    def shuffled(matrix, dense, call):
        order = torch.randperm(matrix.shape[1])
        return matrix[:, order].float() @ dense[order].float()

    Library(monkeypatch, shuffled)
    with pytest.raises(Rejected, match="other bits from the same inputs"):
        attempt(GemmProblem(64, 256, 1024, torch.bfloat16, True, True))
    # The checks before the timing pass; the timed runs are looked at as well.
    Library(monkeypatch, tampered(lambda right, n, call: right if call < 12 or call % 7 else right * 1.5))
    with pytest.raises(Rejected, match=r"other bits .* while timed"):
        attempt()


def test_a_result_that_is_not_written_is_rejected(monkeypatch):
    """It returns unwritten memory, which without the NaN in it would be the dense result."""

    class Idle(Library):
        def laid_out(self, result, transposed):
            return torch.empty(result.shape[::-1] if transposed else result.shape, dtype=result.dtype)

    Idle(monkeypatch)
    with pytest.raises(Rejected, match="off by nan"):
        attempt()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("transposed", [False, True])
def test_a_result_of_another_layout_is_rejected(transposed, monkeypatch):
    class Flipped(Library):
        def laid_out(self, result, transposed):
            return super().laid_out(result, transposed).t()

    Flipped(monkeypatch)
    with pytest.raises(Rejected, match="the result is"):
        attempt(GemmProblem(48, 48, 64, torch.float16, True, transposed))


@pytest.mark.parametrize("sparse_us, dense_us", [(0.0, 100.0), (-1.0, 100.0), (float("nan"), 100.0), (5.0, 0)])
def test_impossible_times_are_rejected(sparse_us, dense_us, monkeypatch):
    Library(monkeypatch)
    take_turns(monkeypatch, sparse_us, dense_us)
    with pytest.raises(Rejected, match="cannot be"):
        attempt()


def test_a_dense_result_that_is_off_is_no_measure(monkeypatch):
    Library(monkeypatch)
    right = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *operands: right(*operands) * 1.1)
    with pytest.raises(Rejected, match="dense result is off"):
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
