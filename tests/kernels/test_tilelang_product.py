"""TileLang as a contestant of `make gpu`, without TileLang: what is absent, fails or is wrong is named, never timed."""

# ruff: noqa: F811 (tests take the fixtures that are imported)
from pathlib import Path
from types import SimpleNamespace

import pytest
import tilelang_product
import torch
from cslt import stand_in  # noqa: F401 (a fixture)
from gpu_run import CPU, FakeMachine, run, times, tuned  # noqa: F401 (fixtures)
from shapes import Cell, Layer
from side_by_side import NOT_RUN
from sparse24_kernels import Packed, unpack_nm
from tilelang_product import CELLS, TILINGS, Tiling

CELL = Cell(Layer("Tiny", "up", 48, 32), 32)
GOOD, *_ = NAMES = [str(tiling) for tiling in TILINGS]
NVCC = """#include <cuda.h>
void product() {}
Compilation error:
ptxas fatal   : Insufficient registers"""


def kernel(values, indices, x, result):
    """What the compiled one does, with its arguments."""
    assert indices.dtype == torch.int16 and indices.shape == (48, 2) and values.shape == (48, 16)
    weight = unpack_nm(Packed(values, indices.view(torch.uint8)))
    result.copy_(x @ weight.t())


def wrong(values, indices, x, result):
    kernel(values, indices, x, result)
    result[-1, -1] += 1


def changing(values, indices, x, result):
    kernel(values, indices, x, result)
    changing.calls += 1
    result[0, 0] *= 1 + changing.calls / 128  # bf16 tells these apart


def measure(monkeypatch, kernels: list) -> dict:
    """The tiny cell with these in place of the compiled tilings; an exception is what compiling ends with."""

    def build(cell, tiling):
        found = dict(zip(TILINGS, kernels))[tiling]
        if isinstance(found, Exception):
            raise found
        return found

    changing.calls = 0
    monkeypatch.setattr(tilelang_product, "build", build)
    alone = SimpleNamespace(machine=FakeMachine(), left=lambda reserve=0: 30.0)
    return tilelang_product.measure(CELL, list(TILINGS), alone)


def test_only_what_is_right_is_timed(stand_in, times, monkeypatch):
    times.of = {"cuSPARSELt": 800.0, GOOD: 500.0}
    row = measure(monkeypatch, [kernel, wrong, changing, RuntimeError(NVCC)])
    assert row["best"] == GOOD and row["times_dense"] == 2.0 and row["algorithm"] == [3, 1, -1]
    assert row["verdict"]["met"] and row["verdict"]["ratio"] == 1.6
    reasons = [row["times"][name].get("error") for name in ("dense", "cuSPARSELt", *NAMES)]
    assert reasons[:3] == [None] * 3 and "is allowed" in reasons[3] and "other bits" in reasons[4]
    assert reasons[5] == "RuntimeError: ptxas fatal   : Insufficient registers"
    assert [name for name, found in row["times"].items() if "median_us" in found] == ["dense", "cuSPARSELt", GOOD]


def test_the_fastest_tiling_must_beat_cusparselt_by_the_tuners_margin(stand_in, times, monkeypatch):
    times.of = {"cuSPARSELt": 800.0, NAMES[0]: 900.0, NAMES[1]: 790.0}
    row = measure(monkeypatch, [kernel] * 4)
    assert row["best"] == NAMES[1] and row["verdict"]["met"] is False


def test_nothing_right_is_no_verdict(stand_in, times, monkeypatch):
    row = measure(monkeypatch, [wrong] * 4)
    assert row["best"] is None and row["verdict"]["met"] is None and "median_us" in row["times"]["cuSPARSELt"]


def test_a_fault_ends_the_process_and_says_where(stand_in, times, monkeypatch):
    def fault(*_):
        monkeypatch.setattr(torch.Tensor, "sum", fault)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match=f"checking {NAMES[1]}: RuntimeError: CUDA error: an illegal"):
        measure(monkeypatch, [kernel, fault, kernel, kernel])


def test_absence_is_reported(tuned, times, tmp_path, monkeypatch):
    for found, reason in ((None, "tilelang is not installed"), (True, "wgmma.sp needs compute capability 9.0")):
        monkeypatch.setattr(tilelang_product, "find_spec", lambda name, found=found: found)
        code, result, page = run(tmp_path, "products")
        assert code == 0 and result["tilelang"] == {"why_not": reason, "wanted": 1.02, "rows": {}}
        assert f"Not measured: {reason}." in page and "| Tiny up" in page


def test_failures_are_reported_and_the_run_goes_on(tuned, times, tmp_path, monkeypatch):
    cells, asked = [str(cell) for cell in CELLS], []
    good = {
        "best": NAMES[2],
        "times_dense": 1.5,
        "verdict": {"what": "TileLang over cuSPARSELt", "ratio": 1.25, "target": 1.02, "met": True},
        "times": {"dense": {"median_us": 900.0}, "cuSPARSELt": {"median_us": 750.0}, NAMES[2]: {"median_us": 600.0}}
        | {NAMES[1]: {"error": "AssertionError: other bits"}},
        "clocks": "1980 MHz",
    }

    def in_process(script, argument, seconds):
        name, tilings = argument
        asked.append(tilings)
        assert seconds <= tilelang_product.SECONDS
        if name == cells[0]:
            return {"error": f"not done after 35 s: checking {NAMES[0]}"}
        return good if name == cells[1] else 1 / 0

    monkeypatch.setattr(tilelang_product, "why_not", lambda device: None)
    monkeypatch.setattr(tilelang_product, "in_process", in_process)
    code, result, page = run(tmp_path, "products")
    assert code == 0 and not result["errors"] and "unfinished" not in result and "| Tiny up" in page
    assert asked == [list(TILINGS), list(TILINGS[1:]), list(TILINGS[1:])]  # not again what has ended a process
    assert f"| {cells[0]} | not done after 35 s: checking {NAMES[0]} |" in page
    assert f"| {cells[1]} | {NAMES[2]} | 600.0 | 900.0 | 750.0 | 1.50 | 1.25 | 1980 MHz |" in page
    assert f"- {cells[1]}, {NAMES[1]}: AssertionError: other bits" in page
    assert f"| {cells[2]} | ZeroDivisionError: division by zero |" in page
    assert "At 1 of 1 layers measured it is 1.02 times as fast as cuSPARSELt or more." in page


def test_no_time_left(tuned, times, tmp_path, monkeypatch):
    monkeypatch.setattr(tilelang_product, "why_not", lambda device: None)
    monkeypatch.setattr(tilelang_product, "SHARE", 0)
    code, result, _ = run(tmp_path, "products")
    assert code == 0 and result["tilelang"]["rows"] == {str(cell): {"error": NOT_RUN} for cell in CELLS}


def test_the_script_answers():
    answer = tilelang_product.in_process(Path(tilelang_product.__file__), ["no such layer", TILINGS], 60)
    assert answer == {"error": "StopIteration: "}


def test_every_tiling_fits_every_cell():
    for cell in CELLS:
        for out, tokens, inputs, stages, _ in TILINGS:
            assert cell.layer.out % out == cell.tokens % tokens == cell.layer.inputs % inputs == 0
            assert cell.layer.inputs >= 2 * inputs
            # Values, indices and x in bf16, all stages, and the result, which takes their place: at most 227 KB.
            stage = 2 * (out * inputs // 2 + out * inputs // 16 + tokens * inputs)
            assert max(stages * stage, 2 * out * tokens) <= 227 * 1024
    assert tilelang_product.why_not(CPU) is not None and len({str(Tiling(*t)) for t in TILINGS}) == len(TILINGS)
