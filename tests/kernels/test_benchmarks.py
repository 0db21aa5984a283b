"""`make gpu` on kernels and GEMMs without a GPU: gates, time, errors and the report, with tiny sizes."""

# ruff: noqa: F811 (tests take the fixtures that are imported)
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import sparse24_kernels as kernels
import torch
from benchmarks import gate, gemms, operations, tilelang_gemm, timing
from benchmarks import run as run_module
from cslt import StandIn, stand_in  # noqa: F401 (a fixture)
from gpu_run import CPU, LAYERS, SHAPES, FakeMachine, run, times, tiny, tuned  # noqa: F401 (fixtures)
from sparse24_kernels import Packed, unpack_nm
from sparse24_kernels import gpu as triton_kernels
from sparse24_kernels.gemm import autotune

from recipes.benchmarks import gpu

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN that are put in on purpose


def test_a_green_run_reports_every_workload(tiny, tmp_path):
    code, result, page = run(tmp_path, "kernels")
    assert code == 0 and "unfinished" not in result and set(result["sections"]) == {"kernels"}
    found = result["gates"]["gate of the kernels"]
    assert found["failed"] == {} and found["not_reached"] == [] and found["passed"] > len(tiny)
    for workload in tiny:
        row = result["sections"]["kernels"]["rows"][str(workload)]
        speed = workload.bytes() / 1e-3
        assert row["times"]["ours"]["us"] == pytest.approx(1000) and row["facts"]["GB/s"] == pytest.approx(speed / 1e9)
        assert row["goals"] == {"ours": workload.target}
        assert f"| {workload} | 1000 | 1000 (1.00, meets {workload.target:g}) |" in page
    assert "eager PyTorch, us" in page and "- clocks after kernels: 1980 MHz" in page


def test_the_page_has_what_the_json_has():
    times = {"dense": {"us": 100.0, "how": "graph"}, "fast": {"us": 50.0, "how": "graph"}}
    times |= {"slow": {"us": 400.0, "how": "loop: x"}, "bad": {"error": "E: no"}}
    goals = {"fast": 2.5, "bad": 1.0, "absent": 1.0}
    row = {"times": times, "facts": {"clocks": "1 MHz", "none": None, "n": 3.14159}, "goals": goals}
    rows = {"a": row, "b": {"error": "not run"}}
    gates = {"gate": {"passed": 1, "failed": {"x": "y"}, "not_reached": ["z"], "seconds": 1}}
    sections = {"part": {"note": "Read this.", "base": "dense", "rows": rows}}
    result = {"environment": {"device": "D"}, "command": "c", "date": "d", "unfinished": "part", "errors": {"e": "f"}}
    page = run_module.page(result | {"gates": gates, "sections": sections})
    assert "| a | 100.0 | 50.00 (2.00, **misses** 2.5) | 400.0 loop | E: no | 1 MHz | | 3.14 |" in page
    for text in ("# 2:4 benchmarks on D", "- not finished: part", "- section e failed: f", "**Red", "- x: y", "z"):
        assert text in page
    assert "Read this." in page and "| b: not run |" in page


def test_what_a_red_check_is_for_is_withheld(tiny, tmp_path, monkeypatch):
    kernel = triton_kernels.masks.nm_mask
    monkeypatch.setattr(triton_kernels.masks, "nm_mask", lambda *arguments: ~kernel(*arguments))
    code, result, page = run(tmp_path, "kernels")
    failed = result["gates"]["gate of the kernels"]["failed"]
    assert code == 1 and any("nm_mask bits, rows 8x64" in name for name in failed) and "withheld" in page
    for workload in tiny:
        ours = result["sections"]["kernels"]["rows"][str(workload)]["times"]["ours"]
        assert ("withheld" in ours.get("error", "")) == (str(workload) in failed) == ("us" not in ours)
    assert any("AssertionError" in path.read_text() and "differ" in path.read_text() for path in tmp_path.glob("*.log"))
    code, result, _ = run(tmp_path, "kernels", "--despite-gate")
    rows = result["sections"]["kernels"]["rows"].values()
    assert code == 1 and all("us" in row["times"]["ours"] for row in rows)
    assert sum("ours: unverified" in row["facts"] for row in rows) == len(set(failed) & set(map(str, tiny))) > 0


def test_a_gate_that_cannot_run_vouches_for_nothing(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(gate, "checks", lambda *_: 1 / 0)
    code, result, page = run(tmp_path, "kernels")
    assert code == 1 and "ZeroDivisionError" in page
    assert any("checks(" in path.read_text() for path in tmp_path.glob("*.log"))
    for row in result["sections"]["kernels"]["rows"].values():
        assert "has verified nothing" in row["times"]["ours"]["error"] and "us" in row["times"]["copy of as many bytes"]


def test_gates_of_an_earlier_run(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "answer", lambda *command: "abc123" if "git" in command else None)
    _, first, _ = run(tmp_path / "first", "kernels")
    (earlier,) = (tmp_path / "first").glob("*.json")
    monkeypatch.setattr(gate, "run_all", lambda *_: pytest.fail("it runs again"))
    code, second, _ = run(tmp_path / "second", "kernels", "--gate", str(earlier))
    assert code == 0 and second["gates"] == first["gates"]
    assert all("us" in row["times"]["ours"] for row in second["sections"]["kernels"]["rows"].values())
    for commit, message in (("def456", "commit was abc123, and is def456"), ("abc123-dirty", "and is abc123-dirty")):
        monkeypatch.setattr(timing, "answer", lambda *command, commit=commit: commit if "git" in command else None)
        code, third, _ = run(tmp_path / commit, "kernels", "--gate", str(earlier))
        assert code == 1 and message in third["errors"]["gate of the kernels"] and not third["gates"]


@pytest.mark.parametrize("error", ["", "not run: out of time: hung", "its process ended with -11: "])
def test_what_a_gate_does_not_reach(tiny, tmp_path, monkeypatch, error):
    """Out of time is no failure, but a row whose own check was not reached is withheld; a crash is a failure."""
    verified = {str(workload): "" for workload in tiny[1:]}
    monkeypatch.setattr(gate, "run_all", lambda *_: verified | {str(tiny[0]): error})
    code, result, _ = run(tmp_path, "kernels")
    assert code == int("process" in error)
    found = {name: row["times"]["ours"] for name, row in result["sections"]["kernels"]["rows"].items()}
    assert ("withheld" in found.pop(str(tiny[0])).get("error", "")) == bool(error)
    assert all("us" in ours for ours in found.values())


def test_gates_share_checks_among_processes(tmp_path, monkeypatch):
    """Every check has a result: one that hangs costs its process, one that crashes costs itself, in a fresh process."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "some_checks.py").write_text(
        "import os, time\n"
        "def bad(): raise ValueError('wrong')\n"
        "def killed(): os.kill(os.getpid(), 9)\n"
        "names = {'good': lambda: print('noise'), 'bad': bad, 'killed': killed, 'last': lambda: None, 'other': None}\n"
        "def checks(device): return [(name, run) for name, run in names.items()]\n"
    )
    results = gate.run_all("some_checks", CPU, 300, 2, "")
    assert results.pop("killed").startswith("it died of SIGKILL") and "TypeError" in results.pop("other")
    assert results == {"good": "", "bad": "ValueError: wrong", "last": ""}
    results = gate.run_all("some_checks", CPU, 0, 1, "")
    assert all(error.startswith(run_module.NOT_RUN) for error in results.values())
    assert gate.run_all("some_checks", CPU, 300, 0, "ba") == {"bad": "ValueError: wrong"}


def test_children_end_in_time(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    (tmp_path / "a_child.py").write_text("import time\ndef good(x): return {'x': x}\ndef slow(): time.sleep(60)\n")
    with gate.Child(gate.WORKER) as child:
        assert gate.call(child, "a_child:good", 1, seconds=60) == ({"x": 1}, "")
        assert gate.call(child, "a_child:slow", seconds=1) == (None, "no answer within 1 s")
        assert gate.call(child, "a_child:absent", seconds=60)[1].startswith("AttributeError")


def test_an_operation_that_raises_is_recorded_and_the_run_goes_on(tiny, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError(f"out of luck in {run_module.ROOT}/file\nand more")

    sizes = {str(workload): workload.bytes() for workload in tiny}
    monkeypatch.setattr(operations.Workload, "bytes", lambda workload: sizes[str(workload)])
    monkeypatch.setitem(operations.PUBLIC, "masks.count_flips", broken)
    code, result, page = run(tmp_path, "kernels")
    rows = result["sections"]["kernels"]["rows"]
    assert code == 0
    for name, row in rows.items():
        error = "RuntimeError: out of luck in ./file" if name.startswith("flips") else None
        assert row["times"]["ours"].get("error") == error and (error is None or error in page)
        assert "us" in row["times"]["copy of as many bytes"]
    monkeypatch.setattr(operations.Workload, "bytes", lambda workload: 1 / 0)
    code, result, page = run(tmp_path, "kernels")
    assert code == 0 and page.count("ZeroDivisionError") == len(tiny)


def test_the_time_is_kept(tiny, tmp_path, monkeypatch):
    now = 0.0

    class Slow(FakeMachine):
        def prepare(self, calls):
            nonlocal now
            now += 5
            return super().prepare(calls)

    monkeypatch.setattr(run_module, "time", SimpleNamespace(monotonic=lambda: now))
    code, result, page = run(tmp_path, "kernels", "--minutes", "0.8", machine=Slow())
    rows = result["sections"]["kernels"]["rows"]
    assert code == 0 and now <= 48 and 0 < sum("times" in row for row in rows.values()) < len(rows)
    assert page.count(run_module.NOT_RUN) >= 1


def test_gpu_only_checks_on_a_cpu(tiny):
    """Of these only the graph needs a GPU."""
    workload = next(workload for workload in tiny if workload.name == "prune mask: packed")
    gate.opcheck(workload, CPU)
    gate.full_graph(workload, CPU, backend="aot_eager")


def test_workloads():
    found = list(operations.workloads())
    assert len({str(workload) for workload in found}) == len(found) > 390
    mask = next(w for w in found if str(w) == "nm_mask bits, rows 768x3072 bfloat16")
    assert mask.bytes() == 768 * 3072 * 2 + 768 * 3072 // 8
    assert {workload.function for workload in found} >= set(operations.PUBLIC)
    entries = operations.Operations().entries()
    assert len(entries) == len(found) and len({(w.name, w.dtype) for w in entries[:100]}) == 100
    assert len({w.name for w in found if operations.COMPILED.match(w.name)}) == 16


def test_baselines_run(tiny):
    for workload in tiny:
        for name, make in operations.baselines(workload):
            if "tile" not in name and "cuSPARSELt" not in name:  # a CPU has neither
                make(workload.arguments(CPU))()
        arguments = workload.arguments(CPU)
        expected = operations.kernel_cases.run(operations.reference, workload.function, arguments)
        for ours, theirs in zip(operations.tensors(workload.call(arguments)), expected):
            assert torch.equal(ours, theirs)


def test_a_kernel_compiles_without_a_gpu():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(operations.__file__).with_name("ahead_of_time.py")
    command = [sys.executable, str(script), "unpack"]
    pages = [subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout for _ in "12"]
    assert pages[0] == pages[1] and re.search(r"\| unpack bfloat16 \| unpack \| \d+ \| 0 \| .*4 STG\.E\.128", pages[0])


def test_samples_are_taken_in_turn_and_time_runs_out():
    order = []
    samplers: dict[str, timing.Sampler] = {
        name: (lambda name=name: order.append(name) or float(len(order)), {"how": "graph"}) for name in "ab"
    }
    found = timing.in_turn(samplers, samples=3)
    assert order == list("ababab") and found["a"]["us"] == 3e6 and found["b"]["max_us"] == 6e6
    assert timing.ratio(found, "a", "b") == 0.75 and timing.ratio(found, "a", "c") is None
    found["b"]["how"] = "loop: no graph"
    assert timing.ratio(found, "a", "b") is None
    with pytest.raises(timing.OutOfTime), timing.time_limit(0.05):
        while True:
            pass


def test_a_way_that_takes_too_long_leaves_the_others_their_times(tmp_path):
    def endless():
        while True:
            pass

    makers = {"good": lambda: [lambda: 1], "bad": lambda: 1 / 0, "slow": endless, "later": lambda: []}
    options = SimpleNamespace(minutes=1, output=tmp_path, despite_gate=False)
    row = run_module.Run(FakeMachine(), options, []).compare(makers, 0.2)
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


# GEMMs


def test_the_gate_of_gemms_passes_what_is_right_and_catches_what_is_not(stand_in, monkeypatch):
    found = gemms.checks(CPU, SHAPES)
    assert len({name for name, _ in found}) == len(found) == 2 * (3 + 2)
    for _, check in found:
        check()
    monkeypatch.setattr(torch, "_cslt_sparse_mm", StandIn(wrong_ids=(3,)).matmul)
    for _, check in found:
        with pytest.raises(AssertionError, match="is allowed"):
            check()


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
    code, result, page = run(tmp_path, "gemms")
    assert code == 0 and len(tuned) == 6 and len(result["sections"]["autotuning"]["rows"]) == 6
    rows = result["sections"]["GEMMs"]["rows"]
    assert set(rows) == {f"{layer}: {name}" for layer in LAYERS for name in gemms.NAMES}
    row = rows[f"{LAYERS[1]}: output"]
    assert row["facts"]["algorithm"] == [3, 1, -1] and row["facts"]["compression"][1] >= 0
    assert row["goals"] == {"auto": gemms.AUTO, "sparse, packing": 1.5}
    assert rows[f"{LAYERS[0]}: output"]["goals"] == {"auto": gemms.AUTO}  # too few tokens
    times_of_row = "1000 | 500.0 (2.00) | 800.0 (1.25, **misses** 1.5) | 1250 (0.80) | 500.0 (2.00, meets 0.98) |"
    assert f"| {LAYERS[1]}: output | {times_of_row}" in page


def test_what_is_not_tuned_is_dense_under_auto(tiny, tuned, times, tmp_path, monkeypatch):
    monkeypatch.setattr(autotune, "tune", lambda *_, **__: 1 / 0)
    times |= {"sparse": 5000.0}
    code, result, page = run(tmp_path, "gemms")
    assert code == 1 and "ZeroDivisionError" in result["errors"]["autotuning"]
    row = result["sections"]["GEMMs"]["rows"][f"{LAYERS[0]}: output"]
    assert row["facts"]["auto runs"] == "dense" and row["times"]["auto"]["us"] == 1000 and "not tuned" in page
    assert row["times"]["sparse"]["us"] == 5000.0 and "default" not in row["times"]  # the same algorithm


def test_a_wrong_algorithm_is_not_timed_and_the_others_are(tiny, tuned, times, tmp_path, monkeypatch):
    monkeypatch.setattr(gemms, "checks", lambda _: [("a", lambda: None)])
    monkeypatch.setattr(torch, "_cslt_sparse_mm", StandIn(wrong_ids=(3,)).matmul)
    code, result, page = run(tmp_path, "gemms")
    row = result["sections"]["GEMMs"]["rows"][f"{LAYERS[0]}: output"]
    assert code == 0 and "is allowed" in row["times"]["sparse"]["error"] and "us" in row["times"]["default"]
    assert f"| {LAYERS[0]}: output | 1000 | AssertionError" in page


def test_packed_weights(tiny, tuned, times, tmp_path):
    times |= {"packed": 600.0, "unpacked": 2000.0, "compressed": 900.0}
    code, result, page = run(tmp_path, "gemms")
    rows = result["sections"]["packed weights"]["rows"]
    one, many = (rows[f"Tiny 32x48, {tokens} tokens, forward"] for tokens in (1, 32))
    assert code == 0 and one["goals"] == {"packed": 1.4, "auto": gemms.AUTO} and not many["goals"]
    assert "compressed" not in one["times"] and many["times"]["auto"]["us"] == 900
    assert one["facts"]["GB/s"] == pytest.approx(32 * 48 * 9 / 8 / 600e-6 / 1e9)
    assert "| 600.0 (1.67, meets 1.4) | 2000 (0.50) |" in page


def test_packed_weights_that_are_multiplied_wrong_have_no_time(tiny, tuned, times, tmp_path, monkeypatch):
    packed_linear = kernels.packed_linear
    monkeypatch.setattr(kernels, "packed_linear", lambda *args, plan: packed_linear(*args, plan=plan) + 1)
    code, result, _ = run(tmp_path, "gemms")
    found = result["sections"]["packed weights"]["rows"]["Tiny 32x48, 1 tokens, forward"]["times"]
    assert code == 0 and "us" in found["dense"]
    assert all("is allowed" in found[way]["error"] for way in ("packed", "unpacked"))


TILELANG = tilelang_gemm.TileLang().entries()


def test_tilelang(tiny, tuned, times, tmp_path, monkeypatch):
    """As far as a CPU goes: what is absent, fails or is wrong is named, never timed."""
    monkeypatch.setattr(tilelang_gemm.TileLang, "entries", lambda self: LAYERS[1:])
    code, result, page = run(tmp_path, "gemms")
    rows = result["sections"]["TileLang's gemm_sp"]["rows"]
    assert code == 0 and "us" in rows[str(LAYERS[1])]["times"]["cuSPARSELt"] and "No module named 'tilelang'" in page

    def good(values, indices, x, result):
        result.copy_(x @ unpack_nm(Packed(values, indices.view(torch.uint8))).t())

    def wrong(values, indices, x, result):
        good(values, indices, x, result)
        result[-1, -1] += 1

    first, second, third = (f"tiles of {tiling}" for tiling in tilelang_gemm.TILINGS)
    kinds = dict(zip(tilelang_gemm.TILINGS, (good, wrong, good)))
    monkeypatch.setattr(tilelang_gemm, "build", lambda layer, tiling: kinds[tiling])
    times |= {"cuSPARSELt": 800.0, first: 700.0, third: 500.0}
    _, result, page = run(tmp_path, "gemms")
    row = result["sections"]["TileLang's gemm_sp"]["rows"][str(LAYERS[1])]
    assert "| 500.0 (1.60) |" in page and "is allowed" in row["times"][second]["error"]
    for layer in TILELANG:
        for out, tokens, inputs, stages in tilelang_gemm.TILINGS:
            assert layer.out % out == layer.tokens % tokens == layer.inputs % inputs == 0
            # Values, indices and x in bf16, all stages, and the result, which takes their place: at most 227 KB.
            stage = 2 * (out * inputs // 2 + out * inputs // 16 + tokens * inputs)
            assert max(stages * stage, 2 * out * tokens) <= 227 * 1024
