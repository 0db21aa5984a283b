"""What autotuning chooses, from which measurements; where it keeps them, and what it does with a damaged table."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import cslt
import pytest
import torch
from sparse24_kernels.gemm import GemmProblem, autotune, cpu_kernels, cusparselt, measure
from sparse24_kernels.gemm.autotune import Measured, read, table_path, tune, verdict_of, write
from sparse24_kernels.gemm.problem import bucket, bucket_start

CPU = torch.device("cpu")
HERE = "Test GPU, 9.0, 801, torch 2.13.0"
PROBLEM = GemmProblem(128, 4096, 256, torch.bfloat16, True)


def reset():
    """As a new process starts."""
    autotune._decide.cache_clear()
    autotune._table.cache_clear()


@pytest.fixture(autouse=True)
def stage(tmp_path, monkeypatch):
    """A cache of this test alone, and a device that would do."""
    monkeypatch.setenv("SPARSE24_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cusparselt, "unsupported_device", lambda device: None)
    monkeypatch.setattr(autotune, "current_environment", lambda device: HERE)
    reset()
    yield
    reset()


def measured(algorithm: int, sparse_us: float) -> Measured:
    return Measured(algorithm, sparse_us, 100.0)


def remember(problem: GemmProblem, found: Measured | str, environment: str = HERE) -> Path:
    """Into the user's cache, as tuning in another process does."""
    write(read() | {(environment, problem): found})
    reset()
    return table_path()


def test_untuned_is_dense_and_says_what_to_do():
    verdict = verdict_of(PROBLEM, CPU)
    assert verdict == ("dense", None, None, None, "not tuned: run `hf-sparse24 tune`", False)
    assert not table_path().parent.exists()


def test_what_cannot_run_is_dense_with_the_reason(monkeypatch):
    assert "multiples of 128" in verdict_of(PROBLEM._replace(k=24), CPU).reason
    assert "float32" in verdict_of(PROBLEM._replace(dtype=torch.float32), CPU).reason
    for library in (cusparselt, cpu_kernels):
        monkeypatch.setattr(library, "unsupported_device", lambda device: "no such device")
    reset()
    remember(PROBLEM, measured(1, 50.0))
    assert verdict_of(PROBLEM, CPU)[::4] == ("dense", "no such device") and not verdict_of(PROBLEM, CPU).measured
    with pytest.raises(ValueError, match="no such device"):
        tune([PROBLEM], CPU)


def test_round_trip():
    remember(PROBLEM, measured(20, 50.0))
    other = PROBLEM._replace(n=16, dtype=torch.float16, transposed=False)
    remember(other, "refused")
    assert read() == {(HERE, PROBLEM): measured(20, 50.0), (HERE, other): "refused"}
    verdict = verdict_of(PROBLEM, CPU)
    assert verdict[:4] == ("cusparselt", 20, 50.0, 100.0) and verdict.measured
    assert "2.00 times" in verdict.reason and "128 x 4096 x 256" in verdict.reason
    verdict = verdict_of(other, CPU)
    assert verdict.backend == "dense" and "refused" in verdict.reason and verdict.measured
    for sparse_us, backend in ((97.0, "cusparselt"), (98.5, "dense"), (200.0, "dense")):
        remember(PROBLEM, measured(1, sparse_us))
        assert verdict_of(PROBLEM, CPU)[:4] == (backend, 1, sparse_us, 100.0)  # the fastest, for who asks for it


def test_an_entry_serves_its_own_problem_and_environment(monkeypatch):
    remember(PROBLEM, measured(1, 50.0))
    for change in ({"m": 384}, {"k": 128}, {"n": 2048}, {"dtype": torch.float16}, {"transposed": False}, {"n": 4097}):
        assert verdict_of(PROBLEM._replace(**change), CPU).reason == autotune.NOT_TUNED
    reset()
    monkeypatch.setattr(autotune, "current_environment", lambda device: "elsewhere")
    assert verdict_of(PROBLEM, CPU).reason == autotune.NOT_TUNED
    remember(PROBLEM, measured(2, 50.0), environment="elsewhere")
    assert verdict_of(PROBLEM, CPU).algorithm == 2 and len(read()) == 2


def test_buckets():
    given = (0, 1, 16, 17, 33, 48, 49, 4096, 4097, 6144, 6145)
    assert [*map(bucket, given)] == [16, 16, 16, 32, 48, 48, 64, 4096, 6144, 6144, 8192]
    for n in range(2, 3000):
        start = bucket_start(n)
        assert start <= n <= bucket(n) == bucket(start) and start in (1, bucket(start - 1) + 1)


def test_in_a_compiled_graph(monkeypatch):
    """No graph break, and a dynamic n is guarded by its bucket."""
    weight = torch.nn.Parameter(torch.randn(128, 256))

    def double_if_sparse(x):
        verdict = verdict_of(GemmProblem(128, x.shape[0], 256, torch.bfloat16, True), x.device)
        return x @ weight.t() * (2 if verdict.backend == "cusparselt" else 1)

    remember(PROBLEM._replace(n=96), measured(1, 50.0))
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(double_if_sparse, fullgraph=True, backend=backend)
    for n in (70, 80, 90, 96, 100, 128, 81):
        x = torch.randn(n, 256)
        torch.testing.assert_close(compiled(x), double_if_sparse(x))
        assert torch.equal(compiled(x), x @ weight.t()) == (n > 96)
    assert len(graphs) == 3  # static, then one for each bucket


def edited(**changes):
    return lambda text: json.dumps(json.loads(text) | changes)


UNREADABLE = {
    "empty": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "nested": lambda text: "[" * 100_000,
    "a time that is no number": lambda text: text.replace("50.0", "NaN"),
    "a size that is no number": lambda text: re.sub(r"\b256\b", '"256"', text),
    "a size of 0": lambda text: re.sub(r"\b256\b", "0", text),
    "newer format": edited(format=10),
    "a bad entry": edited(entries=[1]),
    "an unknown dtype": lambda text: text.replace("bfloat16", "float7"),
}


def test_a_damaged_table_is_refused_until_it_is_deleted():
    path = remember(PROBLEM, measured(1, 50.0))
    whole = path.read_text()
    for damage in UNREADABLE.values():
        path.write_text(damaged := damage(whole))
        with pytest.raises(ValueError, match=r"gemms\.json .*delete it"):
            verdict_of(PROBLEM, CPU)
        assert path.read_text() == damaged
    path.unlink()
    assert verdict_of(PROBLEM, CPU).reason == autotune.NOT_TUNED


def test_a_save_that_fails_leaves_the_old_file(monkeypatch):
    path = remember(PROBLEM, measured(1, 50.0))
    before, files = path.read_text(), set(path.parent.iterdir())
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        remember(PROBLEM, measured(2, 50.0))
    assert path.read_text() == before and verdict_of(PROBLEM, CPU).algorithm == 1
    assert set(path.parent.iterdir()) == files


def test_a_table_that_may_not_be_read_is_none_and_is_not_written_over(monkeypatch):
    path = remember(PROBLEM, measured(1, 50.0))
    before = path.read_text()
    monkeypatch.setattr(Path, "read_text", lambda path: (_ for _ in ()).throw(PermissionError(13, "denied", str(path))))
    monkeypatch.setattr(autotune, "search", lambda problem, device: "refused")
    with pytest.warns(UserWarning, match=r"denied.*: no GEMM is tuned"):
        assert verdict_of(PROBLEM, CPU).reason == autotune.NOT_TUNED
    with pytest.raises(PermissionError):
        tune([PROBLEM], CPU)
    monkeypatch.undo()
    assert path.read_text() == before


def test_cache_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/somebody")
    monkeypatch.setenv("SPARSE24_CACHE", "~/own")
    assert table_path().parent == Path("/somebody/own")
    monkeypatch.delenv("SPARSE24_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert table_path().parent == Path("/xdg/sparse24")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert table_path().parent == Path("/somebody/.cache/sparse24")


class Library(cslt.StandIn):
    """Finds `found`, or raises it; `us` is the time of an algorithm's last GEMM, and dense math takes 100 us."""

    host_us = 0.0

    def __init__(self, found, us, **behaviour):
        super().__init__(**behaviour)
        self.found, self.us, self.last = found, us, None

    def search(self, compressed, dense, bias, alpha, out_dtype, transposed):
        if isinstance(self.found, Exception):
            raise self.found
        return self.found, 2, 1, 63

    def matmul(self, *operands, alg_id=0, **rest):
        self.last = alg_id
        if self.us.get(self.last) is None:
            raise RuntimeError("not supported\nin words")
        return super().matmul(*operands, alg_id=alg_id, **rest)

    def sampler(self, call):
        def sample():
            self.last = None
            result = call()
            return 100.0 if self.last is None else self.us[self.last], result

        return sample

    def install(self, monkeypatch) -> "Library":
        monkeypatch.setattr(torch, "_cslt_compress", self.compress)
        monkeypatch.setattr(torch, "_cslt_sparse_mm", self.matmul)
        monkeypatch.setattr(torch._C, "_cusparselt", SimpleNamespace(mm_search=self.search), raising=False)
        monkeypatch.setattr(measure, "sampler", self.sampler)
        monkeypatch.setattr(measure, "host_us", lambda call, device: self.host_us)
        return self


SMALL = GemmProblem(128, 48, 128, torch.bfloat16, True)


@pytest.mark.parametrize(("us", "fastest"), [({7: 40.0, 0: 60.0}, 7), ({7: 80.0, 0: 60.0}, 0)])
def test_the_faster_of_what_the_search_finds_and_the_default(us, fastest, monkeypatch):
    Library(7, us).install(monkeypatch)
    seen = []
    verdict = tune([SMALL, SMALL._replace(n=40)], CPU, lambda problem, done: seen.append((problem, done)))[SMALL]
    assert verdict[:4] == ("cusparselt", fastest, us[fastest], 100.0) and seen == [(SMALL, 0)]


def test_a_gemm_that_is_shorter_than_its_start_stays_dense(monkeypatch):
    library = Library(7, {7: 40.0, 0: 60.0}).install(monkeypatch)
    library.host_us = 300.0
    verdict = tune([SMALL], CPU)[SMALL]
    assert verdict[:4] == ("dense", 7, 40.0, 100.0)  # the fastest, for who asks for it
    assert verdict.reason.endswith("2.50 times as fast, but the host takes 300.0 us to start it")
    library.host_us = 90.0
    assert tune([SMALL], CPU)[SMALL][:4] == ("cusparselt", 7, 40.0, 100.0)


@pytest.mark.parametrize(
    ("us", "behaviour", "why"),
    [(10.0, {"wrong_ids": (7,)}, "wrong numbers"), (0.0, {}, "cannot be"), (None, {}, "not supported")],
    ids=["wrong", "zero time", "raises"],
)
def test_a_wrong_raising_or_zero_time_algorithm_is_never_chosen(us, behaviour, why, monkeypatch, caplog):
    Library(7, {0: 90.0, 7: us}, **behaviour).install(monkeypatch)
    assert tune([SMALL], CPU)[SMALL].algorithm == 0
    (failure,) = caplog.messages
    assert "the library's search: " in failure and why in failure and "in words" not in failure
    Library(0, {0: us}, wrong_ids=(0,)).install(monkeypatch)
    verdict = tune([SMALL], CPU)[SMALL]
    assert verdict.backend == "dense" and verdict.measured and "no algorithm passes" in verdict.reason


def test_a_search_that_fails_leaves_the_default_and_no_memory_nothing(monkeypatch, caplog):
    Library(RuntimeError("no heuristic"), {0: 90.0}).install(monkeypatch)
    assert tune([SMALL], CPU)[SMALL].algorithm == 0
    assert "no heuristic" in caplog.text
    monkeypatch.setattr(autotune, "prepare", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory")))
    reason = "measured at 128 x 48 x 128: no algorithm passes the checks: no memory"
    assert tune([SMALL], CPU)[SMALL][::4] == ("dense", reason)


def test_an_interruption_keeps_what_is_measured_and_a_table_of_others(monkeypatch):
    other = PROBLEM._replace(m=256)
    assert verdict_of(SMALL, CPU).reason == autotune.NOT_TUNED  # the file was read
    write({(HERE, other): measured(7, 50.0)})
    Library(0, {0: 10.0}).install(monkeypatch)

    def stop(problem, done):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune([SMALL, PROBLEM], CPU, stop)
    assert set(read()) == {(HERE, SMALL), (HERE, other)}
    assert verdict_of(SMALL, CPU).backend == "cusparselt"
