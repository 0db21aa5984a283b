"""Supervised fine-tuning of chats, as a user runs it, on a tiny model."""

import json

import pytest
from task_runs import MLP, assert_merged, flags
from transformers import AutoModelForCausalLM

from hf_sparse24 import Sparse24Config, Sparse24Linear, patch_model, sparse_weights

pytestmark = [
    # TRL and PEFT still use names of Transformers 4 that Transformers 5 is renaming.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.usefixtures("own_cache"),
]

peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")

import sft  # noqa: E402


def chat_flags(tmp_path, model, chats, kind="instructions", **settings) -> list[str]:
    settings = {
        "dataset": chats / kind,
        "max_length": 96,
        "max_samples": 16,
        "gradient_checkpointing": False,
        **settings,
    }
    return flags(tmp_path, model, **settings)


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def trained_texts(trainer) -> list[str]:
    """Of every example, the text that has labels."""
    rows = trainer.train_dataset
    kept = [[token for token, label in zip(row["input_ids"], row["labels"]) if label != -100] for row in rows]
    return trainer.processing_class.batch_decode(kept)


def test_sft_of_all_weights(tmp_path, models, chats, capsys):
    settings = {"method": "s-ste", "validation_split": "validation", "max_samples": 64}
    trainer = sft.main(chat_flags(tmp_path, models / "sparse", chats, **settings))
    assert type(trainer) is trl.SFTTrainer and "2:4 sparse by s-ste: 3 of" in capsys.readouterr().out
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert all({"flip_rate", "kept_magnitude", "sparse_phase"} <= log.keys() for log in logs) and len(logs) == 4
    start = sft.main(chat_flags(tmp_path, models / "sparse", chats, **settings, learning_rate=0.0))
    assert trainer.evaluate()["eval_loss"] < start.evaluate()["eval_loss"] - 0.05
    answers = {f"{row['completion']}<eos>" for row in read(chats / "instructions" / "train.jsonl")}
    assert all(any(answer.startswith(text) for answer in answers) for text in trained_texts(trainer))
    assert answers & set(trained_texts(trainer))  # not all of them are cut off by max_length


def test_sft_on_chats(tmp_path, models, chats):
    settings = {"method": "s-ste", "kind": "chats", "max_length": 128}
    with pytest.raises(ValueError, match="no chat template, which messages need; give --chat_template_path"):
        sft.main(chat_flags(tmp_path, models / "sparse", chats, **settings))
    template = {"chat_template_path": chats / "chat_template.jinja", "assistant_only_loss": True}
    trainer = sft.main(chat_flags(tmp_path, models / "sparse", chats, **settings, **template))
    answers = {
        "".join(f" {message['content']}<eos>" for message in row["messages"] if message["role"] == "assistant")
        for row in read(chats / "chats" / "train.jsonl")
    }
    assert all(any(answer.startswith(text) for answer in answers) for text in trained_texts(trainer))
    assert isinstance(
        AutoModelForCausalLM.from_pretrained(tmp_path / "out").model.layers[0].mlp.up_proj, Sparse24Linear
    )


def test_sft_with_lora(tmp_path, models, chats, capsys):
    lora_flags = chat_flags(tmp_path, models / "zeros", chats, method="fixed-mask", lora=True, lora_r=4)
    sft.main(lora_flags)
    assert "verified: all 3 weights are 2:4" in capsys.readouterr().out
    base = AutoModelForCausalLM.from_pretrained(models / "zeros")
    patch_model(base, Sparse24Config(method="fixed-mask"))
    assert_merged(tmp_path / "out" / "merged", peft.PeftModel.from_pretrained(base, tmp_path / "out"), MLP)


def test_sft_control_run(tmp_path, models, chats):
    control = sft.main(chat_flags(tmp_path, models / "dense", chats, method="dense"))
    assert not sparse_weights(control.model) and "flip_rate" not in control.state.log_history[0]
    with pytest.raises(ValueError, match=r"method='dense': .* is a 2:4 model"):
        sft.main(chat_flags(tmp_path, models / "sparse", chats, method="dense"))
