"""`make gpu` without a GPU: gate, time budget and report, on tiny workloads and with a made-up clock."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import ahead_of_time
import competitors
import gate
import gpu
import kernel_sections
import pytest
import sparse24_kernels as kernels
import timing
import torch
import workloads
from cases import check
from sparse24_kernels import gpu as room
from workloads import BF16, FP32, Operation, Workload

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN that are put in on purpose
TINY = (8, 64)
CPU = torch.device("cpu")
BENCHMARKS = Path(gpu.__file__).parent


class FakeMachine:
    """Runs every call once; then each takes a millisecond, by its own clock."""

    device, name, l2_bytes = CPU, "Fake: 9000", 1

    def facts(self):
        return {"device": self.name}

    def clocks(self):
        return None

    def copy_bandwidth(self):
        return [1e6, 2e6, 3e6]

    def prepare(self, calls, graph=True):
        for call in calls:
            call()
        return lambda: 1e-3, "graph"

    def host_seconds(self, calls):
        return 1e-5

    def forget(self):
        pass


def tiny_workloads() -> list[Workload]:
    names = ("nm_mask bits, rows", "prune mask: packed", "flips, model", "swiglu backward, row-major")
    return [
        Workload(operation, TINY, dtype)
        for operation in workloads.OPERATIONS
        for dtype in operation.shapes
        if operation.name in names
    ]


def tiny_gate(device, seconds, folder, processes, text):
    """The real one, on a few cases and the tiny workloads."""
    checks = gate.checks(device, text or "masks.nm_mask-3x24")
    checks += [(str(workload), partial(check, workload, device)) for workload in tiny_workloads()]
    results = {}
    gate.run(checks, results.__setitem__)
    return results


def run(folder: Path, *arguments: str, machine=None) -> tuple[int, dict, str]:
    """Exit code, JSON and page."""
    arguments = ["--output", str(folder), "--sections", "kernels", *arguments]
    code = gpu.main(arguments, machine or FakeMachine(), tiny_gate, tiny_workloads())
    stem = folder / "gpu_fake_9000"
    assert sorted(path.name for path in folder.iterdir()) == ["gpu_fake_9000.json", "gpu_fake_9000.md"]
    return code, json.loads(stem.with_suffix(".json").read_text()), stem.with_suffix(".md").read_text()


def test_a_green_run_reports_every_workload(tmp_path):
    found = tiny_workloads()
    assert len({workload.operation for workload in found}) == 4
    code, result, page = run(tmp_path)
    assert code == 0 and "unfinished" not in result
    assert result["gate"]["failed"] == {} and result["gate"]["passed"] > len(found)
    for workload in found:
        row = result["operations"][str(workload)]
        speed = workload.bytes() / 1e-3
        assert row["ours"]["median_us"] == pytest.approx(1000) and row["gb_per_s"] == pytest.approx(speed / 1e9)
        assert row["share_of_copy"] == pytest.approx(speed / 2e6) and row["target_met"] == (speed / 2e6 >= 0.8)
        assert result["competitors"][str(workload)]["eager PyTorch"]["ratio"] == 1
        assert f"| {workload} |" in page
    assert "missed**" in page and set(result["copy"]) == {"before", "after"}


def test_a_red_gate_reports_no_speed(tmp_path, monkeypatch):
    kernel = room.masks.nm_mask
    monkeypatch.setattr(room.masks, "nm_mask", lambda *arguments: ~kernel(*arguments))
    code, result, page = run(tmp_path)
    assert code == 1
    assert any("nm_mask bits, rows 8x64" in name for name in result["gate"]["failed"])
    assert not result["operations"] and not result["competitors"] and "copy" not in result
    assert "no speed is reported" in page and "## Speed" not in page and "differ" in page


def test_a_gate_that_raises_is_red(tmp_path, monkeypatch):
    monkeypatch.setattr(gate, "checks", lambda *_: 1 / 0)
    code, result, page = run(tmp_path)
    assert code == 1 and "ZeroDivisionError" in page and not result["operations"]


def test_an_operation_that_raises_is_recorded_and_the_run_goes_on(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError(f"out of luck in {gpu.ROOT}/file\nand more")

    monkeypatch.setitem(workloads.PUBLIC, "masks.count_flips", broken)
    meta = workloads.Workload.bytes
    monkeypatch.setattr(workloads.Workload, "bytes", lambda w: 1000 if "flips" in str(w) else meta(w))
    code, result, page = run(tmp_path)
    assert code == 0
    flips = next(row for name, row in result["operations"].items() if name.startswith("flips"))
    assert flips["error"] == "RuntimeError: out of luck in ./file" and "ours" not in flips
    assert "out of luck" in page
    assert all("ours" in row for name, row in result["operations"].items() if not name.startswith("flips"))


def test_a_competitor_that_raises_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(
        kernel_sections, "competitors", lambda _: iter([("bad", lambda _: 1 / 0), ("good", lambda _: lambda: None)])
    )
    code, result, page = run(tmp_path)
    assert code == 0
    for rivals in result["competitors"].values():
        assert "ZeroDivisionError" in rivals["bad"]["error"] and rivals["good"]["ratio"] == 1
    assert "| bad | ZeroDivisionError: division by zero |" in page


def test_the_time_is_kept(tmp_path, monkeypatch):
    now = 0.0

    class Slow(FakeMachine):
        def prepare(self, calls, graph=True):
            nonlocal now
            now += 5
            return super().prepare(calls, graph)

    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: now))
    code, result, page = run(tmp_path, "--minutes", "1", machine=Slow())
    assert code == 0 and now <= 60
    timed = [name for name, row in result["operations"].items() if "ours" in row]
    assert 0 < len(timed) < len(tiny_workloads())
    assert {name.rsplit(" ", 2)[0] for name in timed} == {str(w.operation.name) for w in tiny_workloads()}
    assert page.count("not run: out of time") >= 1 and set(result["copy"]) == {"before", "after"}


def test_shares_of_the_gate(tmp_path):
    """In processes: every check is there, also those that were not run."""
    text = "prune.s_ste_scale-1"
    names = {name for name, _ in gate.checks(CPU, text)}
    results = gate.run_all(CPU, 300, tmp_path, 2, text)
    assert set(results) == names and set(results.values()) == {None}
    results = gate.run_all(CPU, 0, tmp_path, 1, text)
    assert set(results) == names and all(error.startswith("not run: out of time") for error in results.values())
    assert not list(tmp_path.iterdir())


def test_gpu_only_checks_on_a_cpu():
    """Of these only the graph needs a GPU."""
    operation = next(o for o in workloads.OPERATIONS if o.name == "prune mask: packed")
    gate._opcheck(Workload(operation, TINY, BF16), CPU)
    gate._full_graph(Workload(operation, TINY, BF16), CPU, backend="aot_eager")


def test_every_operation_has_bytes_and_a_prediction(capsys):
    assert gpu.main(["--list"]) == 0
    printed = capsys.readouterr().out
    results = gpu.read_predictions()
    for workload in workloads.workloads():
        assert str(workload) in printed
        assert ahead_of_time.predicted_seconds(workload, results) >= workload.bytes() / 4.3e12
    assert all("error" not in entry for entry in results["operations"].values())
    mask = next(w for w in workloads.workloads() if str(w) == "nm_mask bits, rows 768x3072 bfloat16")
    assert mask.bytes() == 768 * 3072 * 2 + 768 * 3072 // 8
    assert {workload.function for workload in workloads.workloads()} == set(workloads.PUBLIC)
    largest = {w.dtype: w.elements * w.dtype.itemsize for w in workloads.workloads() if w.shape == (4096, 14336)}
    assert min(largest.values()) >= 64e6


@pytest.mark.parametrize("search", [competitors.conv_search, competitors.matmul_search])
def test_the_competing_searches_find_optimal_masks(search):
    assert competitors.patterns(CPU).shape == (90, 4, 4)
    weight = torch.randn(64, 128)
    torch.testing.assert_close(search(weight), kernels.transposable_mask(weight))


def test_competitors_run():
    """Those that a CPU has."""
    for workload in tiny_workloads():
        for name, make in competitors.competitors(workload):
            if "tile" not in name:
                make(workload.arguments(CPU))()
    operation = Operation("", "masks.nm_mask", lambda *_: (torch.randn(8, 16), 2, 4, 1, True), {FP32: ((8, 16),)})
    workload = Workload(operation, (8, 16), FP32)
    assert torch.equal(
        competitors.in_reference(workload, arguments := workload.arguments(CPU)), workload.call(arguments)
    )
    assert competitors.copy_of(100)((torch.zeros(3),))().numel() == 50


def test_a_kernel_compiles_without_a_gpu(tmp_path):
    """And twice gives the same files."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    for folder in ("first", "second"):
        command = [sys.executable, str(BENCHMARKS / "ahead_of_time.py"), "--only", "unpack", "--output", folder]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    first, second = (sorted((tmp_path / folder).iterdir()) for folder in ("first", "second"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    (kernel,) = json.loads(first[0].read_text())["operations"]["unpack bfloat16"]["kernels"]
    assert kernel["spilled_bytes"] == 0 and kernel["accesses"]["STG.E.128"] == 4
    assert 0 < kernel["instructions_per_element"]["issue"] < 50


def test_samples_are_taken_in_turn_and_time_runs_out():
    order = []
    samplers = {name: (lambda name=name: order.append(name) or float(len(order))) for name in "ab"}
    times = timing.interleave(samplers, samples=3)
    assert order == list("ababab") and times["a"]["median_us"] == 3e6 and times["b"]["max_us"] == 6e6
    with pytest.raises(timing.OutOfTime), timing.time_limit(0.05):
        while True:
            pass
