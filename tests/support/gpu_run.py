"""`make gpu` without a GPU: tiny sizes, a machine and times that are made up."""

import json
from pathlib import Path

import pytest
import torch
from cslt import stand_in  # noqa: F401 (a fixture)
from sparse24_kernels.gemm import autotune

from recipes.benchmarks import gemms, gpu, modules, operations, timing
from recipes.benchmarks.sections import line

CPU = torch.device("cpu")
LAYERS = [gemms.Layer("GPT-2 tiny", 48, 32, 32), gemms.Layer("Tiny", 32, 48, 8192)]
KERNELS = ("nm_mask bits, rows", "prune mask: packed", "s_ste_scale", "swiglu backward, row-major")


class FakeMachine:
    """Runs every call once; then each takes a millisecond, by its own clock."""

    device, name, l2_bytes, facts = CPU, "Fake: 9000", 1, {"device": "Fake: 9000"}

    def clocks(self):
        return "1980 MHz"

    def prepare(self, calls):
        for call in calls:
            call()
        return lambda: 1e-3

    def forget(self):
        pass


@pytest.fixture
def tiny(monkeypatch):
    """Few and small entries."""
    small = list({w.name: w.at((8, 64)) for w in operations.workloads() if w.name in KERNELS}.values())
    monkeypatch.setattr(operations, "workloads", lambda: iter(small))
    for module in (gemms, modules):
        monkeypatch.setattr(module, "layers", lambda: LAYERS)
    monkeypatch.setattr(gemms, "PUBLISHED", [gemms.Published(2, 2, 32, 1.5, 1.25)])
    for module in (gemms, modules):
        monkeypatch.setattr(module, "LENGTH", 16)
    monkeypatch.setitem(gemms.MODELS, "Tiny", (32, 48))
    monkeypatch.setitem(gemms.MODELS, "GPT-2 tiny", (32, 48))
    kinds = (("Tiny", True), ("GPT-2 tiny", True), ("Tiny", False))
    blocks = [gemms.Layer(f"{name} MLP", 48, 32, 32, training=training) for name, training in kinds]
    monkeypatch.setattr(modules.Mlps, "entries", lambda self: blocks)
    return small


@pytest.fixture
def times(monkeypatch):
    """Microseconds by way; what is not in it takes 1000."""
    found: dict[str, float] = {}

    def in_turn(samplers):
        return {way: {"us": found.get(way, 1000.0), "min_us": 0, "max_us": 0} for way in samplers}

    monkeypatch.setattr(timing, "in_turn", in_turn)
    return found


@pytest.fixture
def tuned(stand_in, monkeypatch):  # noqa: F811
    """Problems that were given to the autotuner; what was not given is not tuned, which stays dense."""
    found, verdict = [], autotune.choose(None, CPU)
    nothing = autotune.Verdict("dense", None, None, None, "not tuned", measured=False)
    monkeypatch.setattr(autotune, "tune", lambda problems, device: found.extend(problems))
    monkeypatch.setattr(autotune, "choose", lambda problem, device: verdict if problem in found else nothing)
    return found


def run(folder: Path, sections: str, *arguments: str, machine=None) -> tuple[int, dict, str]:
    """Exit code, JSON, and its rows as text."""
    command = ["--output", str(folder), "--sections", sections, *arguments]
    code = gpu.main(command, machine or FakeMachine())
    assert {path.suffix for path in folder.iterdir()} <= {".json", ".log"}
    path = max(folder.glob("gpu_fake_9000_*.json"))
    result = json.loads(path.read_text())
    rows = [line(entry, row) for found in result["sections"].values() for entry, row in found["rows"].items()]
    return code, result, "\n".join(rows) + "\n"
