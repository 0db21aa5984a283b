"""Packed layers timed on a CPU: tiny sizes, in seconds. What is timed is right, out of cache, and reported whole."""

import json
from argparse import Namespace

import pytest
import sparse24_kernels as kernels
import torch
from benchmarks import cpu
from benchmarks.run import Run, line
from benchmarks.timing import middle
from torch.nn.functional import linear


@pytest.fixture
def native():
    try:
        return cpu.native()
    except RuntimeError as error:
        pytest.skip(str(error))


def run_layers(folder, only=""):
    options = Namespace(minutes=8, output=folder, only=only)
    cpu.Layers(quick=True).execute(Run(cpu.Cpu(), options, ["command"], "layers.json"))
    result = json.loads((folder / "layers.json").read_text())
    return result, result["sections"]["layers"]["rows"]


@pytest.mark.parametrize("dtype", cpu.DTYPES.values())
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 11])
def test_our_dense_kernel(native, dtype, tokens):
    weight, x = torch.randn(20, 192).to(dtype), torch.randn(tokens, 192).to(dtype)
    torch.testing.assert_close(cpu.own_dense(x, weight), linear(x.double(), weight.double()).to(dtype))


def test_every_layer_has_its_ways_ratios_and_goals(native, tmp_path):
    result, rows = run_layers(tmp_path)
    assert len(rows) == 2 * len(cpu.THREADS) * len(cpu.TOKENS) and result["environment"]["cpu"]
    for name, row in rows.items():
        ways = {"torch", "packed", "packed int8"} | (
            {"dense"} if name.split(", ")[1] in ("1 token", "4 tokens") else set()
        )
        assert row["times"].keys() == ways | ({"read"} if ", 1 token," in name else set())
        assert all(time["p10_us"] <= time["us"] <= time["p90_us"] for time in row["times"].values())
        assert next(iter(row["times"])) == row["facts"]["best dense"]
        low, ratio, high = row["facts"]["packed over best dense"]
        assert 0 < low <= ratio <= high and row["facts"]["plan"]
    row = rows["64x128 bf16, 1 token, 2 threads"]
    assert row["goals"] == {**cpu.NEVER_SLOWER, **cpu.GOALS["bf16", 1]}
    assert row["facts"]["read, GB/s"][1] > 0 and row["facts"]["packed int8, share of bandwidth"][1] > 0
    assert rows["64x128 fp32, 4 tokens, 1 thread"]["goals"] == cpu.NEVER_SLOWER
    assert torch.get_num_threads() == 1  # as before


def test_a_way_that_is_missing_or_wrong_leaves_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "own_dense", lambda x, weight: linear(x, weight) * 1.1)
    monkeypatch.setattr(cpu, "packed_layer", lambda x, packed: 1 / 0 if packed.scales is None else x)
    _, rows = run_layers(tmp_path, only="bf16, 4 tokens, 1 thread")
    (row,) = (row for row in rows.values() if "times" in row)
    assert "relative error 0.1" in row["times"]["dense"]["error"] and "ZeroDiv" in row["times"]["packed"]["error"]
    assert row["facts"]["best dense"] == "torch" and "us" in row["times"]["torch"] and "torch" in line("", row)


def test_samples_go_round_the_copies():
    seen = []
    turns = cpu.Turns([lambda i=i: seen.append(i) for i in range(5)], seconds=0)
    assert turns.count == 1
    turns.count = 4
    assert turns.sample() > 0
    assert seen == [0, 1, 2, 3, 4, 0]  # the first two while it was made
    assert middle([3.0, 1.0, 2.0]) == [1.2, 2.0, 2.8] and middle([5.0]) == [5.0, 5.0, 5.0]
    packed = kernels.pack_nm(torch.randn(4, 16))
    copies = cpu.copies(packed, least=1000)
    assert len(copies) == -(-1000 // cpu.size(packed)) == 8
    assert len({part.data_ptr() for copy in copies for part in copy[:2]}) == 16
    assert len(cpu.copies(torch.ones(4), least=1)) == 2
