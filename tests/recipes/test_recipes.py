"""train.py runs as a user runs it: data, models, methods, and runs that go on."""

import json
import math
import os

import pytest
import text_data
import torch
import train
import zoo
from datasets import Dataset
from recipe_runs import LLAMA, TEXTS, flags, jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

from hf_sparse24 import Sparse24Linear, Sparse24Trainer

pytestmark = pytest.mark.usefixtures("own_cache")


def test_pack_on_literal_numbers():
    documents = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9]]
    assert list(text_data.pack(documents, separator=0, block_size=4)) == [[1, 2, 3, 0], [4, 0, 5, 6], [7, 8, 9, 0]]
    assert list(text_data.pack(documents, separator=0, block_size=5)) == [[1, 2, 3, 0, 4], [0, 5, 6, 7, 8]]
    assert list(text_data.pack([[1, 2]], separator=0, block_size=4)) == []


def test_find_files(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt", "d.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    names = lambda source: [os.path.relpath(file, tmp_path) for file in text_data.find_files(str(source))]  # noqa: E731
    assert names(tmp_path / "a.txt") == ["a.txt"]
    assert names(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert names(tmp_path / "**/*.txt") == ["a.txt", "b.txt", "deep/c.txt"]
    assert names(tmp_path) == ["a.txt", "b.txt", "d.md", "deep/c.txt"]
    assert text_data.find_files("wikitext") == text_data.find_files("Salesforce/wikitext-2") == []


@pytest.mark.parametrize("kind", ["text", "directory", "jsonl", "parquet"])
@pytest.mark.parametrize("streaming", [False, True])
def test_trains_on(tmp_path, tokenizer, text_file, kind, streaming):
    source = {"text": text_file, "jsonl": tmp_path / "train.jsonl", "parquet": tmp_path / "train.parquet"}.get(kind)
    if kind == "directory":
        source = tmp_path / "texts"
        source.mkdir()
        for i, text in enumerate(TEXTS):
            (source / f"{i}.py").write_text(text)
    elif kind == "jsonl":
        jsonl(source)
    elif kind == "parquet":
        Dataset.from_dict({"text": TEXTS, "other": TEXTS}).to_parquet(source)
    trainer = train.main(flags(tmp_path, source, tokenizer, streaming=streaming))
    assert trainer.state.global_step == 2
    blocks = [row["input_ids"] for row in trainer.train_dataset]
    assert {len(block) for block in blocks} == {16}
    separators = sum(block.count(trainer.processing_class.eos_token_id) for block in blocks)
    assert separators >= (len(TEXTS) - 1 if kind != "text" else 0)


def test_validation(tmp_path, tokenizer, text_file):
    held_out = train.main(flags(tmp_path, text_file, tokenizer, validation_split=0.1))
    train_blocks, validation_blocks = len(held_out.train_dataset), len(held_out.eval_dataset)
    assert validation_blocks == math.ceil((train_blocks + validation_blocks) * 0.1)
    metrics = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["eval_loss"]))
    validation = {"validation_file": jsonl(tmp_path / "v.jsonl"), "max_validation_samples": 5}
    own_file = train.main(flags(tmp_path, text_file, tokenizer, **validation))
    assert 0 < len(own_file.eval_dataset) < len(own_file.train_dataset)
    few = train.main(flags(tmp_path, jsonl(tmp_path / "t.jsonl"), tokenizer, max_samples=3))
    assert len(few.train_dataset) < train_blocks / 5


@pytest.mark.parametrize("model_type", ["bert", "distilbert"])
def test_masked(tmp_path, tokenizer, text_file, model_type):
    sizes = zoo.MASKED[model_type]
    settings = {"objective": "masked", "mlm_probability": 0.9, "validation_split": 0.1}
    trainer = train.main(flags(tmp_path, text_file, tokenizer, model_type, {**sizes, "pad_token_id": 1}, **settings))
    batch = next(iter(trainer.get_train_dataloader()))
    assert (batch["labels"] != -100).float().mean() > 0.6  # the default is 0.15
    assert trainer.patch_report.patched


def test_pretrained_and_what_is_saved(tmp_path, tokenizer, text_file, capsys):
    first = train.main(flags(tmp_path, text_file, tokenizer, target_modules="attention"))
    assert "2:4 sparse by s-ste: 4 of" in capsys.readouterr().out
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(saved.model.layers[0].self_attn.q_proj, Sparse24Linear)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<eos>"
    for name in ("train_results.json", "all_results.json", "trainer_state.json"):
        assert (tmp_path / "out" / name).exists()

    plain = AutoModelForCausalLM.from_config(type(first.model.config)(vocab_size=300, **LLAMA))
    plain.save_pretrained(tmp_path / "plain")
    pretrained = {"model_type": None, "config_overrides": None, "model_name_or_path": tmp_path / "plain"}
    trainer = train.main(flags(tmp_path, text_file, tokenizer, **pretrained, learning_rate=0.0))
    assert all(torch.equal(p, plain.get_parameter(name)) for name, p in trainer.model.named_parameters())
    assert isinstance(trainer, Sparse24Trainer)

    pretrained["model_name_or_path"] = tmp_path / "out"
    with pytest.raises(ValueError, match=r"method='dense': .* is a 2:4 model"):
        train.main(flags(tmp_path, text_file, tokenizer, **pretrained, method="dense"))
    with pytest.raises(ValueError, match=r"method='ste': .* was trained by 's-ste', and goes on by that"):
        train.main(flags(tmp_path, text_file, tokenizer, **pretrained, method="ste"))


def test_dense_control(tmp_path, tokenizer, text_file, capsys):
    trainer = train.main(flags(tmp_path, text_file, tokenizer, method="dense"))
    assert type(trainer) is Trainer
    assert not hasattr(trainer.model.config, "quantization_config")
    assert "sparse" not in capsys.readouterr().out


def test_a_teacher(tmp_path, tokenizer, text_file):
    train.main(flags(tmp_path, text_file, tokenizer, method="dense")).save_model(tmp_path / "teacher")
    teacher = {"teacher": tmp_path / "teacher", "distillation": json.dumps({"weight": 0.5, "temperature": 1})}
    trainer = train.main(flags(tmp_path, text_file, tokenizer, **teacher, validation_split=0.1, logging_steps=1))
    logs = [log for log in trainer.state.log_history if "loss" in log]
    for log in logs:
        assert log["loss"] == pytest.approx((log["cross_entropy"] + log["distillation_loss"]) / 2)
    assert len(logs) == 2


def test_a_second_run_that_saves_no_checkpoints_mixes_none(tmp_path, tokenizer, text_file):
    train.main(flags(tmp_path, text_file, tokenizer, save_strategy="steps", save_steps=2))
    train.main(flags(tmp_path, text_file, tokenizer))
