"""`make gpu` on products and models without a GPU: tiny sizes, a machine and times that are made up."""

import json
from pathlib import Path

import gpu
import product_gate
import pytest
import side_by_side
import torch
from cslt import stand_in  # noqa: F401 (a fixture)
from shapes import Block, Cell, Layer
from sparse24_kernels import tuner

CPU = torch.device("cpu")
SHAPES = ((32, 32, 48), (34, 32, 16))
CELLS = [Cell(Layer("Tiny", "up", 48, 32, True), 32), Cell(Layer("Tiny", "down", 32, 48), 8192)]
TINY_BLOCKS = [Block("Tiny", 32, 48, True, 32), Block("Tiny", 32, 48, False, 32, True)]


class FakeMachine:
    """Runs every call once. Times are those of `Times`."""

    device, name, l2_bytes = CPU, "Fake: 9000", 1

    def facts(self):
        return {"device": self.name}

    def clocks(self):
        return "1980 MHz"

    def prepare(self, calls):
        for call in calls:
            call()
        return (lambda: 1e-3), "graph"

    def forget(self):
        pass


class Times:
    """In place of `interleave`: 1000 us, or what was set for a name."""

    def __init__(self):
        self.of: dict[str, float] = {}

    def __call__(self, samplers):
        return {name: {"median_us": self.of.get(name, 1000.0)} for name in samplers}


@pytest.fixture
def times(monkeypatch):
    found = Times()
    monkeypatch.setattr(side_by_side, "interleave", found)
    return found


@pytest.fixture
def tuned(stand_in, monkeypatch):  # noqa: F811
    """Problems that the tuner was given; what it was not given is not tuned, which stays dense."""
    found, verdict = [], tuner.choose(None, CPU)

    def tune(problems, device, *, seconds_per_problem):
        assert seconds_per_problem == side_by_side.SECONDS_PER_PROBLEM
        found.extend(problems)

    nothing = tuner.Verdict("dense", None, None, None, tuner.NOT_TUNED)
    monkeypatch.setattr(tuner, "tune", tune, raising=False)
    monkeypatch.setattr(tuner, "choose", lambda problem, device: verdict if problem in found else nothing)
    return found


def run(folder: Path, sections: str, *arguments: str, machine=None) -> tuple[int, dict, str]:
    """Exit code, JSON and page."""

    def prepare(run):
        run.cells, run.blocks = CELLS, TINY_BLOCKS
        run.product_checks = lambda: product_gate.checks(CPU, SHAPES, "aot_eager")[:8]  # those of bf16

    arguments = ["--output", str(folder), "--sections", sections, *arguments]
    code = gpu.main(arguments, machine or FakeMachine(), lambda *_: {}, [], prepare)
    stem = folder / "gpu_fake_9000"
    return code, json.loads(stem.with_suffix(".json").read_text()), stem.with_suffix(".md").read_text()
