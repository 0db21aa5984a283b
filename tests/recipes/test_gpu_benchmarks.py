"""`make gpu` on kernels and GEMMs without a GPU: time, errors and the report, with tiny sizes."""

# ruff: noqa: F811 (tests take the fixtures that are imported)
from types import SimpleNamespace

import pytest
import torch
from cslt import StandIn, stand_in  # noqa: F401 (a fixture)
from gpu_run import CPU, LAYERS, FakeMachine, run, times, tiny, tuned  # noqa: F401 (fixtures)
from sparse24_kernels.gemm import autotune

from recipes.benchmarks import cases, gemms, gpu, operations, sections, timing

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN that are put in on purpose


def test_a_green_run_reports_every_workload(tiny, tmp_path):
    code, result, text = run(tmp_path, "kernels")
    assert code == 0 and set(result["sections"]) == {"kernels"}
    for workload in tiny:
        row = result["sections"]["kernels"]["rows"][str(workload)]
        assert row["times"]["ours"]["us"] == pytest.approx(1000)
        assert row["facts"]["GB/s"] == pytest.approx(workload.bytes() / 1e6)
        assert row["goals"] == {"ours": workload.target}
        ours = f"ours 1000 us (1.00, meets {workload.target:g})"
        assert f"{workload}: copy of as many bytes 1000 us | {ours}" in text
    assert "eager PyTorch 1000 us (1.00)" in text and result["environment"]["clocks after kernels"] == "1980 MHz"


def test_a_row_as_text():
    times = {"dense": {"us": 100.0}, "fast": {"us": 50.0}, "slow": {"us": 400.0}, "bad": {"error": "E: no"}}
    text = sections.line("a", {"times": times, "goals": {"fast": 2.5, "bad": 1.0, "absent": 1.0}})
    assert text == "a: dense 100 us | fast 50 us (2.00, MISSES 2.5) | slow 400 us (0.25) | bad E: no"
    assert sections.line("b", {"error": "not run"}) == "b: not run"


def test_an_operation_that_raises_is_recorded_and_the_run_goes_on(tiny, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError(f"out of luck in {sections.ROOT}/file\nand more")

    sizes = {str(workload): workload.bytes() for workload in tiny}
    monkeypatch.setattr(operations.Workload, "bytes", lambda workload: sizes[str(workload)])
    monkeypatch.setitem(operations.PUBLIC, "prune.s_ste_scale", broken)
    code, result, text = run(tmp_path, "kernels")
    rows = result["sections"]["kernels"]["rows"]
    assert code == 0
    for name, row in rows.items():
        error = "RuntimeError: out of luck in ./file" if name.startswith("s_ste_scale") else None
        assert row["times"]["ours"].get("error") == error and (error is None or error in text)
        assert "us" in row["times"]["copy of as many bytes"]


def test_the_time_is_kept(tiny, tmp_path, monkeypatch):
    now = 0.0

    class Slow(FakeMachine):
        def prepare(self, calls):
            nonlocal now
            now += 5
            return super().prepare(calls)

    monkeypatch.setattr(sections, "time", SimpleNamespace(monotonic=lambda: now))
    code, result, text = run(tmp_path, "kernels", "--minutes", "0.8", machine=Slow())
    rows = result["sections"]["kernels"]["rows"]
    assert code == 0 and now <= 48 and 0 < sum("times" in row for row in rows.values()) < len(rows)
    assert text.count(sections.NOT_RUN) >= 1


def test_every_operation_is_timed_and_one_shape_of_each_has_baselines():
    found = list(operations.workloads())
    assert len({str(workload) for workload in found}) == len(found) > 250
    mask = next(w for w in found if str(w) == "nm_mask bits, rows 768x3072 bfloat16")
    assert mask.bytes() == 768 * 3072 * 2 + 768 * 3072 // 8
    entries = operations.Operations().entries()
    kinds = {(w.name, w.dtype) for w in found}
    assert len(entries) == len(found) and {(w.name, w.dtype) for w in entries[: len(kinds)]} == kinds
    assert {w.function for w in found} >= set(operations.PUBLIC)


def test_baselines_run(tiny, compiler):
    for workload in tiny:
        for name, make in operations.baselines(workload):
            if "tile" not in name and "cuSPARSELt" not in name:  # a CPU has neither
                make(workload.arguments(CPU))()
        arguments = workload.arguments(CPU)
        expected = cases.run(operations.reference, workload.function, arguments)
        for ours, theirs in zip(operations.tensors(workload.call(arguments)), expected):
            assert torch.equal(ours, theirs)


def test_samples_are_taken_in_turn():
    order = []
    samplers = {name: (lambda name=name: order.append(name) or float(len(order))) for name in "ab"}
    found = timing.in_turn(samplers, samples=3)
    assert order == list("ababab") and found["a"]["us"] == 3e6 and found["b"]["max_us"] == 6e6


def test_a_way_that_takes_too_long_leaves_the_others_their_times(tmp_path):
    def endless():
        while True:
            pass

    makers = {"good": lambda: [lambda: 1], "bad": lambda: 1 / 0, "slow": endless, "later": lambda: []}
    options = SimpleNamespace(minutes=1, output=tmp_path)
    row = sections.Run(FakeMachine(), options, []).compare(makers, 0.2)
    found = row["times"]
    assert list(found) == list(makers) and found["good"]["us"] == 1000 and row["facts"] == {}
    assert (
        "ZeroDivision" in found["bad"]["error"] and "OutOfTime" in found["slow"]["error"] and "error" in found["later"]
    )


def test_list_and_sections(capsys):
    assert gpu.main(["--list"]) == 0
    printed = capsys.readouterr().out
    for section in gpu.SECTIONS:
        assert all(f"{entry}\n" in printed for entry in section.entries())
    assert gpu.main(["--list", "--sections", "gemms", "--only", "Llama 8B query"]) == 0
    printed = capsys.readouterr().out
    assert "Llama 8B query 4096x4096, 8192 tokens: grad_weight" in printed and "1B" not in printed
    with pytest.raises(SystemExit):
        gpu.main(["--sections", "nothing"])
    assert torch.cuda.is_available() or gpu.main([]) == 2


def test_the_papers_sizes_are_timed_as_gemms_ffns_and_blocks():
    ffns, blocks = gemms.published("FFN"), gemms.published("block")
    assert len(ffns) == len(blocks) == 36
    for layer, size in (*ffns.items(), *blocks.items()):
        assert layer.out == 4 * layer.inputs and layer.tokens == size.sequences * 2048 and layer.bias
    entries = {section.name: {str(entry) for entry in section.entries()} for section in gpu.SECTIONS}
    assert entries["the papers' sizes"] == {str(layer) for layer in (*ffns, *blocks)}
    assert {f"{half}: {name}" for ffn in ffns for half in ffn.pair() for name in gemms.NAMES} <= entries["GEMMs"]


# GEMMs


def test_three_ways():
    truth = torch.randn(64, 64)
    dense = truth.bfloat16()
    gemms.assert_three_way(dense, dense, truth, "equal")
    one_wrong = dense.clone()
    one_wrong[3, 5] += 1
    for bad in (one_wrong, dense + 0.05, dense * float("nan")):
        with pytest.raises(AssertionError, match="bad: error"):
            gemms.assert_three_way(bad, dense, truth, "bad")
    for bad in (truth, dense[:3]):
        with pytest.raises(AssertionError, match=r"bad: torch\.Size"):
            gemms.assert_three_way(bad, dense, truth, "bad")


def test_gemms(tiny, tuned, times, tmp_path):
    times |= {"sparse": 500.0, "sparse, packing": 800.0, "default": 1250.0}
    code, result, text = run(tmp_path, "gemms")
    # Of two layers that are each other's transpose, the output GEMM of one is the grad_input GEMM of the other.
    assert code == 0 and len(tuned) == len(set(tuned)) == 3 * len(LAYERS) + 4 * 2
    rows = result["sections"]["GEMMs"]["rows"]
    assert all("us" in row["times"]["sparse"] for row in rows.values())
    row = rows[f"{LAYERS[1]}: output"]
    assert row["facts"]["algorithm"] == [3, 1, -1]
    assert row["goals"] == {"auto": gemms.AUTO, "sparse, packing": 1.5}
    assert rows[f"{LAYERS[0]}: output"]["goals"] == {"auto": gemms.AUTO}  # too few tokens
    cells = ("dense 1000 us", "sparse 500 us (2.00)", "sparse, packing 800 us (1.25, MISSES 1.5)")
    cells += ("default 1250 us (0.80)", "auto 500 us (2.00, meets 0.98)")
    assert f"{LAYERS[1]}: output: {' | '.join(cells)}\n" in text


def test_a_gemm_that_cannot_be_tuned_leaves_its_error(tiny, tuned, tmp_path, monkeypatch):
    monkeypatch.setattr(autotune, "tune", lambda *_, **__: 1 / 0)
    rows = run(tmp_path, "gemms")[1]["sections"]["GEMMs"]["rows"]
    assert {row["error"] for row in rows.values()} == {"ZeroDivisionError: division by zero"}


def test_a_wrong_algorithm_is_not_timed_and_the_others_are(tiny, tuned, times, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "_cslt_sparse_mm", StandIn(wrong_ids=(3,)).matmul)
    code, result, text = run(tmp_path, "gemms")
    row = result["sections"]["GEMMs"]["rows"][f"{LAYERS[0]}: output"]
    assert code == 0 and "is allowed" in row["times"]["sparse"]["error"] and "us" in row["times"]["default"]
    assert f"{LAYERS[0]}: output: dense 1000 us | sparse AssertionError" in text
