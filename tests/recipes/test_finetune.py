"""GLUE: its metrics on literal numbers, the small data sets, and the recipe that trains on them."""

import evaluate
import glue
import pytest
import torch
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
