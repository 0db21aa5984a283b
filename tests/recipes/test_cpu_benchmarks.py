"""Benchmarks on a CPU at tiny sizes, in seconds: what is timed is right and reported; and the pages of the results."""

import json

import build_site
import cpu_page
import pytest
import sparse24_kernels as kernels
import torch
from recipe_runs import InThisProcess
from sparse24_kernels.cpu.library import load
from torch.nn.functional import linear

from hf_sparse24.methods import METHODS
from recipes.benchmarks import builds, cpu, cpu_layers, cpu_training
from recipes.benchmarks.timing import Cycle, middle, over, spread, take_turns, turns
from recipes.benchmarks.variants import Variant


def run(folder, section, *arguments):
    assert cpu.main([section, "--quick", "--output", str(folder), *arguments]) == 0
    result = json.loads((folder / cpu.SECTIONS[section][1]).read_text())
    assert result["environment"]["torch"] == torch.__version__ and f"cpu.py {section} --quick" in result["command"]
    return result["sections"][section]["rows"], result


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr(cpu_training, "Variant", lambda *_, limits: InThisProcess(cpu_training.load()))
    monkeypatch.setattr(cpu_training.Pruning, "threads", (1,))


@pytest.fixture(scope="module")
def dense_kernel():
    try:
        cpu_layers.native()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", builds.DTYPES.values())
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("tokens", [1, 4, 11])
def test_our_dense_kernel(dense_kernel, dtype, tokens, rows):
    weight, x = torch.randn(20, 192).to(dtype), torch.randn(tokens, 192).to(dtype)
    torch.testing.assert_close(cpu_layers.own_dense(x, rows, weight), linear(x.double(), weight.double()).to(dtype))


def test_a_layer_has_its_ways_ratios_and_goals(tmp_path):
    rows, _ = run(tmp_path, "layers", "--only", "bf16, 1 token, 2 threads")
    row = rows["64x128 bf16, 1 token, 2 threads"]
    assert {"torch", "packed", "packed int8"} <= row["times"].keys()
    best = row["facts"]["best dense"]
    assert next(iter(row["times"])) == best
    low, ratio, high = row["facts"]["packed over best dense"]
    assert 0 < low <= ratio <= high and row["facts"]["plan"] and "| 64x128 |" in cpu_page.page(tmp_path / "cpu")
    assert row["goals"] == {**cpu_layers.NEVER_SLOWER, **cpu_layers.GOALS["bf16", 1]}
    assert torch.get_num_threads() == 1  # as before


def test_a_way_that_is_missing_or_wrong_leaves_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_layers, "own_dense", lambda x, rows, weight: linear(x, weight) * 1.1)
    monkeypatch.setattr(cpu_layers, "packed_layer", lambda x, packed: 1 / 0 if packed.scales is None else x)
    (row,) = run(tmp_path, "layers", "--only", "bf16, 4 tokens, 1 thread")[0].values()
    assert "relative error 0.1" in row["times"]["dense"]["error"] and "ZeroDiv" in row["times"]["packed"]["error"]
    assert row["facts"]["best dense"] == "torch" and "us" in row["times"]["torch"]


def test_samples_go_round_the_copies():
    seen = []
    sample = Cycle([lambda i=i: seen.append(i) for i in range(5)], seconds=0)
    assert sample.count == 1
    sample.count = 4
    assert sample() > 0
    assert seen == [0, 1, 2, 3, 4, 0]  # the first two while it was made
    packed = kernels.pack_nm(torch.randn(4, 16))
    copies = cpu_layers.copies(packed, least=1000)
    assert len(copies) == -(-1000 // cpu_layers.size(packed)) == 8
    assert len({part.data_ptr() for copy in copies for part in copy[:2]}) == 16


def test_samples_are_taken_in_turn_and_compared_within_a_turn():
    order = []
    samplers = {name: (lambda name=name: order.append(name) or float(len(order))) for name in "ab"}
    found = take_turns(samplers, 3)
    assert order == list("abababab") and found == {"a": [3, 5, 7], "b": [4, 6, 8]}  # without the warm-up turn
    assert over([4.0, 9.0, 1.0], [2.0, 3.0, 1.0]) == [1.2, 2.0, 2.8]
    assert list(turns(2, 5, seconds=0)) == [-1, 0, 1] and list(turns(2, 5)) == [-1, 0, 1, 2, 3, 4]
    assert middle([3.0, 1.0, 2.0]) == [1.2, 2.0, 2.8] and middle([5.0]) == [5.0, 5.0, 5.0]
    assert spread([3e-6]) == {"p10_us": 3, "us": 3, "p90_us": 3}


@pytest.mark.parametrize("method", ["dense", *sorted(METHODS)])
def test_a_training_step_of_each_method(method):
    model = builds.build("tiny Llama")
    before = [(weight, weight.detach().clone()) for weight in model.parameters()]  # without adapters, which train late
    step = builds.training_step(model, (2, 8), method)
    losses = [step().item() for _ in range(3)]  # STEP is sparse from its second on
    assert not any(torch.equal(weight, old) for weight, old in before) and losses[2] < losses[0]


@pytest.mark.skipif(isinstance(load(), str), reason="no kernels for this CPU")
def test_training(tmp_path, in_this_process):
    rows, result = run(tmp_path, "training", "--only", "best, 1 thread")
    assert len(rows) == 3
    for row in rows.values():
        ways = [way for way in row["times"] if way != "dense"]
        ratios = [row["facts"][f"{way} over dense"] for way in ways]
        assert row["facts"]["turns"] == 2 and all(0 < low <= ratio <= high for low, ratio, high in ratios), row
    assert ways == [*cpu_training.SPARSE, "s-ste, dense math", "fixed-mask, dense math", "dense, bf16"]
    assert "| a step of the tiny Llama | t-sr-ste | " in build_site._training(result)
    assert "| 32 x 64 x 96, output | " in next(build_site._gemms(result))


def test_what_pruning_costs(tmp_path, in_this_process):
    rows, result = run(tmp_path, "pruning")
    (row,) = rows.values()
    assert list(row["times"]) == ["dense", *sorted(METHODS)]
    assert "| the tiny Llama | s-ste | " in build_site._costs(result)


@pytest.mark.slow
def test_the_processes_of_variants(tmp_path):
    rows, _ = run(tmp_path, "training", "--only", "32 x 64 x 96, output")
    assert rows["32 x 64 x 96, output, avx2, 1 thread"]["facts"]["path"] in ("avx2", "none")
    with pytest.raises(RuntimeError, match="engines nothing ended with 1"):
        Variant("recipes.benchmarks.engines", "nothing")
