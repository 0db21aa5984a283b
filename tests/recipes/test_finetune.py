"""GLUE and SQuAD: their metrics on literal numbers, the small data sets, and the recipes that train on them."""

import evaluate
import glue
import numpy as np
import pytest
import squad
import tiny_tasks
import torch
from datasets import load_dataset
from paths import RECIPES
from recipe_runs import BERT, results, toy_flags
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForMaskedLM, Trainer

from hf_sparse24 import (
    Sparse24Config,
    Sparse24Controller,
    Sparse24Trainer,
    patch_model,
    sparse_run,
    sparse_weights,
)

pytestmark = pytest.mark.usefixtures("metrics_cache")


# --- metrics ---


@pytest.mark.parametrize(
    ("task", "predictions", "references", "expected"),
    [
        ("sst2", [1, 0, 1, 1], [1, 0, 0, 1], {"accuracy": 0.75}),
        ("mrpc", [1, 1, 0, 0], [1, 0, 1, 0], {"accuracy": 0.5, "f1": 0.5}),  # 1 true, 1 false positive, 1 missed
        ("qqp", [0, 0, 0], [0, 0, 0], {"accuracy": 1.0, "f1": 0.0}),
        ("cola", [1, 1, 0, 0, 1], [1, 0, 0, 0, 1], {"matthews_correlation": 2 * 2 / 36**0.5}),  # TP 2, TN 2, FP 1
        ("cola", [1, 1, 1], [0, 1, 1], {"matthews_correlation": 0.0}),
        ("stsb", [1.0, 2.0, 3.0], [2.0, 4.0, 6.0], {"pearson": 1.0, "spearmanr": 1.0}),
        # 0.5 for ranks 0, 1.5, 1.5, 3 against 3, 0, 1, 2, less their means: (-1.5 1.5) + 3 * 0.5 over sqrt(4.5 * 5)
        ("stsb", [1.0, 2.0, 2.0, 9.0], [5.0, 1.0, 2.0, 3.0], {"spearmanr": (-2.25 + 0.75) / 22.5**0.5}),
    ],
)
def test_glue_metrics(task, predictions, references, expected):
    metric = evaluate.load(str(glue.METRIC), task, keep_in_memory=True)
    results = metric.compute(predictions=predictions, references=references)
    assert {name: results[name] for name in expected} == pytest.approx(expected)
    if task != "stsb":
        assert results.keys() == expected.keys()


def test_squad_metrics():
    """Articles, case and punctuation do not count, the best of several answers does."""
    metric = evaluate.load(str(squad.METRIC), keep_in_memory=True)
    truths = [["The Cat!"], ["red car", "blue car"], ["one two two"], ["nothing"]]
    given = ["cat", "a blue truck", "two two three", "all"]
    predictions = [{"id": str(i), "prediction_text": text} for i, text in enumerate(given)]
    references = [
        {"id": str(i), "answers": {"text": texts, "answer_start": [0] * len(texts)}} for i, texts in enumerate(truths)
    ]
    results = metric.compute(predictions=predictions, references=references)
    f1s = [1, 2 * 1 / (2 + 2), 2 * 2 / (3 + 3), 0]
    assert results == pytest.approx({"exact_match": 25.0, "f1": 100 * sum(f1s) / 4})


# --- data ---


def test_tiny_tasks_are_the_same_everywhere_and_have_the_columns_of_the_real_ones(tasks, tmp_path):
    again = tiny_tasks.prepare(tmp_path / "again", vocab_size=1024, max_files=250)
    files = sorted(path.relative_to(tasks) for path in tasks.rglob("*.json*"))
    assert len(files) == 1 + 7 + 2 + 2  # manifest, glue, squad, tokenizer
    for file in files:
        assert (again / file).read_bytes() == (tasks / file).read_bytes()
    stamp = (tasks / "manifest.json").stat().st_mtime_ns
    tiny_tasks.prepare(tasks, vocab_size=1024, max_files=250)
    assert (tasks / "manifest.json").stat().st_mtime_ns == stamp

    for task, splits in tiny_tasks.GLUE.items():
        rows = load_dataset(str(tasks / "glue"), task)
        assert list(rows) == list(splits)
        assert set(rows["train"].column_names) == {*glue.TASKS[task].columns, "label", "idx"}
    labels = load_dataset(str(tasks / "glue"), "sst2")["train"]["label"]
    assert sum(labels) * 2 == len(labels)
    rows = load_dataset(str(tasks / "squad"))
    assert set(rows["train"].column_names) == {"id", "title", "context", "question", "answers"}
    for row in rows["validation"]:
        start, text = row["answers"]["answer_start"][0], row["answers"]["text"][0]
        assert row["context"][start : start + len(text)] == text
    assert not {*rows["train"]["context"]} & {*rows["validation"]["context"]}


def test_parts_of_a_long_context_hold_the_answer(tasks):
    """Over the parts of every example, the true positions give the true answer back, and a full stop at most."""
    tokenizer = AutoTokenizer.from_pretrained(tasks / "tokenizer")
    examples = load_dataset(str(tasks / "squad"))["validation"].take(20)
    args = squad.SquadArguments(max_length=64, stride=16)
    parts = squad.make_parts(examples, args, tokenizer)
    assert len(parts) > len(examples) and set(parts["example"]) == set(range(len(examples)))
    logits = np.full((2, len(parts), 64), -1.0)
    for index, part in enumerate(parts):
        held = part["start_positions"] > 0
        logits[0, index, part["start_positions"]] = logits[1, index, part["end_positions"]] = 1.0 if held else -1.0
    answers = squad.best_answers(examples, parts, *logits, max_answer_length=64)
    found = [answer.rstrip(".") == row["answers"]["text"][0].rstrip(".") for answer, row in zip(answers, examples)]
    whole = [
        any(part["start_positions"] for part in parts if part["example"] == index) for index in range(len(examples))
    ]
    assert found == whole and sum(whole) > 10


def test_best_answers_on_literal_numbers():
    examples = {"context": ["abcd"]}
    examples = type("Rows", (dict,), {"__len__": lambda self: 1})(examples)
    parts = [{"example": 0, "offsets": [(-1, -1), (0, 1), (1, 2), (2, 3), (3, 4)]}]
    starts, ends = np.array([[9.0, 1, 0, 3, 0]]), np.array([[9.0, 0, 5, 1, 4]])
    assert squad.best_answers(examples, parts, starts, ends, 30) == ["cd"]  # 3 + 4; 3 + 5 ends before it begins
    assert squad.best_answers(examples, parts, starts, ends, 1) == ["b"]  # 0 + 5


# --- training ---


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sst2", "mnli", "stsb"])
def test_glue_trains_and_evaluates(tasks, tmp_path, task):
    trainer = glue.main(toy_flags("glue", tasks, tmp_path / "out", task=task, max_steps=3, max_samples=64))
    assert isinstance(trainer, Sparse24Trainer) and trainer.patch_report.patched
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert saved.config.num_labels == glue.TASKS[task].labels and len(sparse_weights(saved)) == 4
    found = results(tmp_path / "out")
    names = {"sst2": {"eval_accuracy"}, "stsb": {"eval_pearson", "eval_spearmanr"}}
    assert names.get(task, {"eval_matched_accuracy", "eval_mismatched_accuracy"}) < found.keys()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dense", "s-ste"])
def test_glue_learns(tasks, tmp_path, method):
    """Half of the sentences are of either class: 0.5 is chance."""
    trainer = glue.main(toy_flags("glue", tasks, tmp_path / "out", task="sst2", method=method, num_train_epochs=6))
    assert type(trainer) is (Trainer if method == "dense" else Sparse24Trainer)
    found = results(tmp_path / "out")
    assert found["eval_accuracy"] > 0.62


@pytest.mark.slow
def test_squad_learns(tasks, tmp_path):
    trainer = squad.main(toy_flags("squad", tasks, tmp_path / "out", num_train_epochs=6, max_length=80))
    assert trainer.patch_report.patched
    found = results(tmp_path / "out")
    assert 0 < found["eval_exact_match"] < found["eval_f1"] and found["eval_f1"] > 25


def test_squad_trains_and_evaluates(tasks, tmp_path):
    squad.main(toy_flags("squad", tasks, tmp_path / "out", max_steps=2, max_samples=32))
    found = results(tmp_path / "out")
    assert {"eval_exact_match", "eval_f1", "eval_loss"} <= found.keys()


@pytest.mark.parametrize("method", ["s-ste", "t-sr-ste", "dense"])
def test_a_pretrained_2_4_checkpoint_is_fine_tuned_as_the_authors_do(tasks, tmp_path, method):
    """S-STE's stays sparse, without MVUE and FP8; one of T-SR-STE, which has ended dense, stays dense."""
    tokenizer = AutoTokenizer.from_pretrained(tasks / "tokenizer")
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=128, pad_token_id=0, **BERT)
    model = BertForMaskedLM(config)
    trained_by = "s-ste" if method == "s-ste" else "t-sr-ste"
    settings = {"fp8": True} if method == "s-ste" else {"dense_tail": 1}
    patch_model(model, Sparse24Config(method=trained_by, **settings))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    Sparse24Controller(model, optimizer, total_steps=2)
    for _ in range(2):
        model(input_ids=torch.ones(2, 8, dtype=torch.long), labels=torch.ones(2, 8, dtype=torch.long)).loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path / "pretrained")

    pretrained = {"model_name_or_path": tmp_path / "pretrained", "model_type": None, "config_overrides": None}
    settings = {"task": "sst2", "method": method, "max_steps": 6, "max_samples": 64, "logging_steps": 1}
    argv = toy_flags("glue", tasks, tmp_path / "out", **settings, **pretrained)
    argv.remove(str(RECIPES / "finetune" / "glue-toy.yaml"))
    trainer = glue.main([*argv, "--use_cpu=true", "--bf16=false", "--max_length=32", "--save_strategy=no"])
    run = sparse_run(trainer.model)
    phases = {log["sparse_phase"] for log in trainer.state.log_history if "sparse_phase" in log}
    if method == "dense":
        assert run is None and type(trainer) is Trainer and not phases
        return
    assert phases == {float(method == "s-ste")} and run.is_dense is (method == "t-sr-ste")
    assert [(gemm.estimator, gemm.precision) for gemm in run.method.gemms] == [("none", "native")] * 3
