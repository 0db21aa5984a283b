"""What autotuning chooses: from which measurements, and when it does not."""

import cslt
import pytest
import torch
from autotune_stage import CPU, HERE, PROBLEM, measured, remember, tune
from sparse24_kernels import GemmProblem, linear_problem, plan_gemm
from sparse24_kernels.gemm import autotune, cusparselt, layout
from sparse24_kernels.gemm.autotune import choose, reset
from sparse24_kernels.gemm.autotune import table as autotune_table
from sparse24_kernels.gemm.autotune.table import Entry, Environment, bucket, bucket_start
from sparse24_kernels.gemm.problem import Algorithm

pytestmark = pytest.mark.usefixtures("autotune_stage")


def test_untuned_is_dense_and_says_what_to_do():
    verdict = choose(PROBLEM, CPU)
    assert verdict == ("dense", None, None, None, "not tuned: run `hf-sparse24 tune`", False)
    assert not HERE.path().parent.exists()


def test_what_cannot_run_is_dense_with_the_reason(monkeypatch):
    assert "multiples of 16" in choose(PROBLEM._replace(k=24), CPU).reason
    assert "float32" in choose(PROBLEM._replace(dtype=torch.float32), CPU).reason
    monkeypatch.setattr(cusparselt, "unsupported_device", lambda device: "no such device")
    reset()
    remember(PROBLEM, measured(1, 50.0))
    assert choose(PROBLEM, CPU)[::4] == ("dense", "no such device") and not choose(PROBLEM, CPU).measured
    with pytest.raises(ValueError, match="no such device"):
        tune([PROBLEM], CPU)


def test_round_trip():
    candidates = measured(17, 60.5), measured(20, 61.25, split_k=2), measured(3, 1e-3)
    remember(PROBLEM, *candidates)
    other = PROBLEM._replace(n=16, dtype=torch.float16, transposed=False)
    remember(other)
    assert autotune_table.read(HERE) == {PROBLEM: Entry(candidates), other: Entry()}
    autotune_table.write(HERE, {PROBLEM: Entry(candidates, ("hung", "wrong numbers"))})
    assert autotune_table.read(HERE)[PROBLEM].failures == ("hung", "wrong numbers")


def test_the_fastest_is_chosen():
    remember(PROBLEM, measured(17, 60.0), measured(20, 50.0))
    verdict = choose(PROBLEM, CPU)
    assert verdict[:4] == ("cusparselt", Algorithm(20), 50.0, 100.0)
    assert "2.00 times" in verdict.reason and "64 x 4096 x 128" in verdict.reason
    remember(PROBLEM)
    assert choose(PROBLEM, CPU).reason.endswith("no algorithm passes the checks")
    assert verdict.measured and choose(PROBLEM, CPU).measured


@pytest.mark.parametrize(
    "sparse_us, backend", [(97.0, "cusparselt"), (98.5, "dense"), (100.0, "dense"), (200.0, "dense")]
)
def test_dense_unless_two_per_cent_faster(sparse_us, backend):
    remember(PROBLEM, measured(1, sparse_us))
    verdict = choose(PROBLEM, CPU)
    assert verdict[:4] == (backend, Algorithm(1), sparse_us, 100.0)


@pytest.mark.parametrize(
    "change", [{"m": 80}, {"k": 144}, {"n": 2048}, {"dtype": torch.float16}, {"transposed": False}, {"n": 4097}]
)
def test_an_entry_serves_its_own_problem(change):
    remember(PROBLEM, measured(1, 50.0))
    assert choose(PROBLEM._replace(**change), CPU).reason == autotune.NOT_TUNED


@pytest.mark.parametrize("place", range(4))
def test_environments_are_apart(place, monkeypatch):
    remember(PROBLEM, measured(1, 50.0))
    elsewhere = Environment(*("other" if i == place else value for i, value in enumerate(HERE)))
    monkeypatch.setattr(autotune, "current_environment", lambda device: elsewhere)
    assert choose(PROBLEM, CPU).backend == "dense"
    remember(PROBLEM, measured(2, 50.0), environment=elsewhere)
    assert choose(PROBLEM, CPU).algorithm.id == 2
    assert len(list(HERE.path().parent.glob("*.json"))) == 2


def test_names_of_devices_make_files_that_are_apart():
    names = {HERE._replace(device=device).path().name for device in ("A/B", "A B", "A-B", "../A-B", "é")}
    assert len(names) == 5 and not [name for name in names if "/" in name or " " in name]


def test_buckets():
    assert [bucket(n) for n in (0, 1, 16, 17, 33, 48, 49, 4096, 4097, 6144, 6145)] == [
        *(16, 16, 16, 32, 48, 48, 64, 4096, 6144, 6144, 8192)
    ]
    for n in range(1, 3000):
        assert bucket_start(n) <= n <= bucket(n)
        assert bucket(bucket_start(n)) == bucket(n) and (
            n == 1 or bucket_start(n) in (1, bucket(bucket_start(n) - 1) + 1)
        )


def test_a_bucket_shares_its_verdict():
    remember(PROBLEM, measured(1, 50.0))
    inside = [choose(PROBLEM._replace(n=n), CPU) for n in (3073, 4000, 4096, 3500)]
    assert {verdict.algorithm.id for verdict in inside} == {1}
    assert {choose(PROBLEM._replace(n=n), CPU).reason for n in (3072, 4097)} == {autotune.NOT_TUNED}


def test_a_verdict_stays_until_reset():
    assert choose(PROBLEM, CPU).backend == "dense"
    autotune_table.write(HERE, {PROBLEM: Entry((measured(1, 50.0),))})
    assert choose(PROBLEM, CPU).reason == autotune.NOT_TUNED
    reset()
    assert choose(PROBLEM, CPU).algorithm.id == 1
    HERE.path().unlink()  # read once
    assert choose(PROBLEM._replace(m=128), CPU).backend == "dense" and choose(PROBLEM, CPU).algorithm.id == 1


def test_steady_state_reads_nothing(monkeypatch):
    remember(PROBLEM, measured(1, 50.0))
    choose(PROBLEM, CPU)
    monkeypatch.setattr(autotune, "_decide", None)
    monkeypatch.setattr(autotune, "_table", None)
    assert choose(PROBLEM._replace(n=4000), CPU).algorithm.id == 1


def test_deterministic_when_asked():
    remember(PROBLEM, measured(1, 50.0, split_k=2), measured(2, 60.0), measured(3, 55.0, split_k=4))
    remember(PROBLEM._replace(m=128), measured(1, 50.0, split_k=2))
    remember(PROBLEM._replace(m=256), measured(1, 50.0, split_k=2), measured(2, 99.0))
    problems = [PROBLEM, PROBLEM._replace(m=128), PROBLEM._replace(m=256)]
    assert [choose(problem, CPU).algorithm for problem in problems] == [Algorithm(1, 2)] * 3
    torch.use_deterministic_algorithms(True)
    try:
        first, second, third = (choose(problem, CPU) for problem in problems)
    finally:
        torch.use_deterministic_algorithms(False)
    assert first[:2] == ("cusparselt", Algorithm(2))
    assert second.backend == "dense" and "deterministic" in second.reason
    assert third.backend == "dense"
    assert choose(PROBLEM, CPU).algorithm == Algorithm(1, 2)


def test_in_a_compiled_graph(monkeypatch):
    """No graph break, a dynamic n is guarded by its bucket, and determinism by its flag."""
    weight = torch.nn.Parameter(torch.randn(64, 128))

    def double_if_sparse(x):
        verdict = choose(GemmProblem(*(64, x.shape[0], 128), torch.bfloat16, True, True), x.device)
        return x @ weight.t() * (2 if verdict.backend == "cusparselt" else 1)

    remember(PROBLEM._replace(n=96), measured(1, 50.0, split_k=2))
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(double_if_sparse, fullgraph=True, backend=backend)
    for n in (70, 80, 90, 96, 100, 128, 81):
        x = torch.randn(n, 128)
        torch.testing.assert_close(compiled(x), double_if_sparse(x))
        assert torch.equal(compiled(x), x @ weight.t()) == (n > 96)
    assert len(graphs) == 3  # static, then one for each bucket
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(compiled(x), x @ weight.t())
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_plan_in_a_compiled_graph_holds_for_its_bucket(monkeypatch):
    """A plan guards n by its bucket and takes m and k as constants."""
    monkeypatch.setattr(torch, "_cslt_compress", cslt.StandIn().compress)
    monkeypatch.setattr(layout, "_compressions", {})
    weight = torch.randn(64, 128)

    def double_if_sparse(x):
        plan = plan_gemm(linear_problem(len(x), *weight.shape, torch.bfloat16), x.device)
        return x @ weight.t() * (2 if plan.is_sparse else 1)

    remember(PROBLEM._replace(n=96), measured(1, 50.0))
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(double_if_sparse, fullgraph=True, backend=backend)
    for n in (70, 80, 90, 96, 100, 128, 81):
        x = torch.randn(n, 128)
        torch.testing.assert_close(compiled(x), x @ weight.t() * (1 if n > 96 else 2))
    assert len(graphs) == 3  # static, then one for each bucket
