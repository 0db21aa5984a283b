"""SFT, LoRA, and one-shot pruning with recovery, as a user runs them, on tiny models and texts."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import zoo
from datasets import Dataset
from paths import RECIPES
from sparse_models import logits
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from hf_sparse24 import Sparse24Config, Sparse24Linear, export_model, patch_model
from hf_sparse24.metrics import is_nm_sparse
from hf_sparse24.weights.sparse_weight import sparse_weights

# TRL and PEFT still use names of Transformers 4 that Transformers 5 is renaming.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")

import arguments  # noqa: E402
import lora  # noqa: E402
import oneshot  # noqa: E402
import sft  # noqa: E402
import stdlib_text  # noqa: E402
import tiny_chats  # noqa: E402

SCRIPTS = {"sft": sft, "lora": lora, "oneshot": oneshot}
TEXTS = [f"def function_{i}(a, b):\n    return a * {i} + b\n" * 6 for i in range(30)]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """One model with a tokenizer: `dense`, `sparse` (a training checkpoint of S-STE), `zeros` (a dense export)."""
    directory = tmp_path_factory.mktemp("models")
    tokenizer = stdlib_text.train_tokenizer(TEXTS, 300)
    torch.manual_seed(0)
    model = zoo.build("llama", vocab_size=300, max_position_embeddings=128, initializer_range=0.2, num_hidden_layers=1)
    model.save_pretrained(directory / "dense")
    patch_model(model, Sparse24Config(method="s-ste"))
    model.save_pretrained(directory / "sparse")
    export_model(model, directory / "zeros")
    for name in ("dense", "sparse", "zeros"):
        tokenizer.save_pretrained(directory / name)
    return directory


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    return tiny_chats.prepare(tmp_path_factory.mktemp("chats"), max_files=60)


def flags(tmp_path, model, **settings) -> list[str]:
    settings = {
        "model_name_or_path": model,
        "output_dir": tmp_path / "out",
        "max_steps": 4,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **settings,
    }
    return [f"--{name}={value}" for name, value in settings.items() if value is not None]


def text_flags(tmp_path, model, **settings) -> list[str]:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return flags(
        tmp_path,
        model,
        **{"dataset": path, "validation_split": 0.1, "eval_on_start": True, "block_size": 16, **settings},
    )


def chat_flags(tmp_path, model, chats, kind="instructions", **settings) -> list[str]:
    settings = {
        "dataset": chats / kind,
        "max_length": 96,
        "max_samples": 16,
        "gradient_checkpointing": False,
        **settings,
    }
    return flags(tmp_path, model, **settings)


def eval_losses(trainer) -> list[float]:
    return [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]


def results(tmp_path) -> dict:
    return json.loads((tmp_path / "out" / "all_results.json").read_text())


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def trained_texts(trainer) -> list[str]:
    """Of every example, the text that has labels."""
    rows = trainer.train_dataset
    kept = [[token for token, label in zip(row["input_ids"], row["labels"]) if label != -100] for row in rows]
    return trainer.processing_class.batch_decode(kept)


def assert_merged(directory: Path, adapted: torch.nn.Module, targets: tuple[str, ...]) -> None:
    """The directory holds a plain model that computes as the adapted one, with every target 2:4."""
    merged = AutoModelForCausalLM.from_pretrained(directory)
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=1e-4, atol=1e-4)
    weights = {name: module.weight for name, module in merged.named_modules() if name.endswith(targets)}
    assert weights and all(is_nm_sparse(weight) for weight in weights.values())
    assert AutoTokenizer.from_pretrained(directory).eos_token == "<eos>"


MLP = ("gate_proj", "up_proj", "down_proj")

# --- LoRA ---


@pytest.mark.parametrize(
    ("base", "settings"),
    [
        ("sparse", {"method": "s-ste"}),
        ("sparse", {"method": "s-ste", "use_dora": True, "lora_dropout": 0.1, "gradient_checkpointing": True}),
        ("zeros", {"method": "fixed-mask", "lora_modules": "up_proj"}),
    ],
    ids=["checkpoint", "dora", "zeros"],
)
def test_lora(tmp_path, models, capsys, base, settings):
    trainer = lora.main(text_flags(tmp_path, models / base, **settings))
    base_loss, *_, loss = eval_losses(trainer)
    assert loss < base_loss - 0.05 and results(tmp_path)["eval_loss"] == loss
    assert "verified: all 3 weights are 2:4" in capsys.readouterr().out
    assert {"adapter_config.json", "merged"} <= {*os.listdir(tmp_path / "out")} and trainer.state.global_step == 4
    model = AutoModelForCausalLM.from_pretrained(models / base)
    if base == "zeros":
        patch_model(model, Sparse24Config(method="fixed-mask"))
    assert_merged(tmp_path / "out" / "merged", peft.PeftModel.from_pretrained(model, tmp_path / "out"), MLP)


def test_lora_exports_packed(tmp_path, models):
    lora.main(text_flags(tmp_path, models / "sparse", method="s-ste", export_format="packed"))
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged")
    assert type(packed.model.layers[0].mlp.up_proj).__name__ == "PackedLinear"


def test_lora_on_a_dense_model_is_the_control_run_or_an_error(tmp_path, models):
    with pytest.raises(ValueError, match=r"3 of 3 weights .* are dense, .*oneshot\.py makes one"):
        lora.main(text_flags(tmp_path, models / "dense", method="fixed-mask"))
    with pytest.raises(ValueError, match="already patched with another config"):
        lora.main(text_flags(tmp_path, models / "sparse", method="fixed-mask"))
    with pytest.raises(ValueError, match=r"method='dense': .* is a 2:4 model"):
        lora.main(text_flags(tmp_path, models / "sparse", method="dense"))
    lora.main(text_flags(tmp_path, models / "dense", method="dense"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged")
    assert not is_nm_sparse(merged.model.layers[0].mlp.up_proj.weight)


def test_lora_resumes(tmp_path, models):
    saving = {"method": "s-ste", "save_strategy": "steps", "save_steps": 2}
    lora.main(text_flags(tmp_path, models / "sparse", **saving))
    whole = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged"))
    with pytest.raises(ValueError, match="holds checkpoint-4 of an earlier run"):
        lora.main(text_flags(tmp_path, models / "sparse", **saving))
    checkpoint = tmp_path / "out" / "checkpoint-2"
    lora.main(text_flags(tmp_path, models / "sparse", **saving, resume_from_checkpoint=checkpoint))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged")), whole)


# --- one shot, and recovery ---


def zeros(model) -> dict[str, torch.Tensor]:
    return {name: weight.mask() for name, weight in sparse_weights(model).items()}


@pytest.mark.parametrize("criterion", ["magnitude", "sparsegpt"])
def test_oneshot_prunes_and_recovers(tmp_path, models, capsys, criterion):
    settings = {"criterion": criterion, "reconstruct": criterion == "magnitude", "calibration_blocks": 24}
    trainer = oneshot.main(text_flags(tmp_path, models / "dense", **settings))
    assert f"one-shot 2:4 by {criterion} masks" in capsys.readouterr().out
    pruned_loss, *_, loss = eval_losses(trainer)
    assert loss < pruned_loss - 0.05
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(saved.model.layers[0].self_attn.q_proj, Sparse24Linear)
    masks = zeros(saved)
    assert len(masks) == 7 and all(torch.equal(mask, zeros(trainer.model)[name]) for name, mask in masks.items())
    # Pruned again with the same data, but not trained: the masks are those of the first.
    again = oneshot.main(text_flags(tmp_path, models / "dense", **settings, learning_rate=0.0))
    assert all(torch.equal(mask, zeros(again.model)[name]) for name, mask in masks.items())


def test_oneshot_with_a_teacher_and_its_dense_control(tmp_path, models):
    distilled = {"teacher": models / "dense", "distillation": '{"weight": 0.5}', "calibration_blocks": 8}
    trainer = oneshot.main(text_flags(tmp_path, models / "dense", **distilled))
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert all(log["loss"] == pytest.approx((log["cross_entropy"] + log["distillation_loss"]) / 2) for log in logs)
    control = oneshot.main(text_flags(tmp_path, models / "dense", method="dense"))
    assert not sparse_weights(control.model)


def test_oneshot_resumes(tmp_path, models):
    saving = {"save_strategy": "steps", "save_steps": 2, "calibration_blocks": 8}
    whole = oneshot.main(text_flags(tmp_path, models / "dense", **saving))
    with pytest.raises(ValueError, match="holds checkpoint-4 of an earlier run"):
        oneshot.main(text_flags(tmp_path, models / "dense", **saving))
    checkpoint = tmp_path / "out" / "checkpoint-2"
    resumed = oneshot.main(text_flags(tmp_path, models / "dense", **saving, resume_from_checkpoint=checkpoint))
    assert torch.equal(logits(whole.model), logits(resumed.model))


# --- SFT ---


def test_the_chats_that_every_machine_can_make(tmp_path, chats):
    rows, held_out = (read(chats / "instructions" / f"{split}.jsonl") for split in ("train", "validation"))
    assert len(rows) > 100 and all(row["completion"].strip() in row["prompt"] for row in rows)
    assert not {row["prompt"] for row in rows} & {row["prompt"] for row in held_out}
    conversation = read(chats / "chats" / "train.jsonl")[0]["messages"]
    assert [message["role"] for message in conversation] == ["user", "assistant"] * 3
    written = (chats / "manifest.json").stat().st_mtime_ns
    assert tiny_chats.prepare(chats, max_files=60) == chats
    assert (chats / "manifest.json").stat().st_mtime_ns == written


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
    with pytest.raises(ValueError, match=r"3 of 3 weights .* are dense"):
        sft.main(chat_flags(tmp_path, models / "dense", chats, method="fixed-mask", lora=True))


def test_sft_control_run(tmp_path, models, chats):
    control = sft.main(chat_flags(tmp_path, models / "dense", chats, method="dense"))
    assert not sparse_weights(control.model) and "flip_rate" not in control.state.log_history[0]
    with pytest.raises(ValueError, match=r"method='dense': .* is a 2:4 model"):
        sft.main(chat_flags(tmp_path, models / "sparse", chats, method="dense"))


def test_sft_resumes(tmp_path, models, chats):
    saving = {"method": "s-ste", "save_strategy": "steps", "save_steps": 2}
    whole = sft.main(chat_flags(tmp_path, models / "sparse", chats, **saving))
    with pytest.raises(ValueError, match="holds checkpoint-4 of an earlier run"):
        sft.main(chat_flags(tmp_path, models / "sparse", chats, **saving))
    checkpoint = tmp_path / "out" / "checkpoint-2"
    resumed = sft.main(chat_flags(tmp_path, models / "sparse", chats, **saving, resume_from_checkpoint=checkpoint))
    assert torch.equal(logits(whole.model), logits(resumed.model))


# --- arguments ---


@pytest.mark.parametrize(
    ("script", "settings", "message"),
    [
        ("lora", {"lora_r": 0}, "lora_r=0: must be at least 1"),
        ("lora", {"lora_dropout": 1.0}, r"lora_dropout=1.0: must be in \[0, 1\)"),
        ("lora", {"export_format": "gguf"}, "export_format='gguf': must be one of dense, packed"),
        ("oneshot", {"criterion": "taylor"}, "criterion='taylor': must be one of magnitude, wanda"),
        ("oneshot", {"calibration_blocks": 0}, "calibration_blocks=0: must be at least 1"),
        ("oneshot", {"method": "s-ste", "calibration_blocks": 8}, "method='s-ste': oneshot chooses masks"),
        ("oneshot", {"distillation": "{}", "teacher": None, "method": "nm"}, "method='nm': must be one of dense"),
    ],
)
def test_wrong_arguments(tmp_path, models, script, settings, message):
    with pytest.raises(ValueError, match=message):
        SCRIPTS[script].main(text_flags(tmp_path, models / "dense", **settings))


@pytest.mark.parametrize(("package", "settings"), [("peft", {"lora": True}), ("trl", {})])
def test_missing_packages(tmp_path, models, chats, monkeypatch, package, settings):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "sft")
    with pytest.raises(ImportError, match=rf"needs {package}: pip install -c constraints\.txt -e '\.\[{package}\]'"):
        importlib.import_module("sft").main(
            chat_flags(tmp_path, models / "zeros", chats, method="fixed-mask", **settings)
        )


def test_wrong_chats(tmp_path, models):
    with pytest.raises(ValueError, match="dataset is missing"):
        sft.main(flags(tmp_path, models / "sparse"))
    Dataset.from_dict({"question": ["1 + 1"], "answer": ["2"]}).to_json(tmp_path / "data" / "train.jsonl")
    with pytest.raises(
        ValueError, match=r"has the columns \['answer', 'question'\]; SFT needs messages, or prompt and"
    ):
        sft.main(flags(tmp_path, models / "sparse", dataset=tmp_path / "data", max_length=64))


@pytest.mark.parametrize("name", SCRIPTS)
def test_full_size_and_toy_settings(name):
    """The scripts know every key; the toy settings on top of the others ask for nothing that a CPU lacks."""
    full, toy = (str(RECIPES / "finetune" / f"{name}{suffix}.yaml") for suffix in ("", "-toy"))
    classes = SCRIPTS[name].ARGUMENTS
    *_, training_args = arguments.parse_arguments(classes, [full, "--bf16", "false", "--use_cpu", "true"])
    assert training_args.output_dir == f"runs/{name}"
    *_, training_args = arguments.parse_arguments(classes, [full, toy])
    assert training_args.use_cpu and not training_args.bf16 and training_args.max_steps > 0
    assert isinstance(training_args, TrainingArguments) and training_args.output_dir == f"runs/{name}-toy"


@pytest.mark.slow
def test_two_processes(tmp_path, models):
    """Each prunes its own copy by the same data; then they train as one process with the same global batch."""
    runs = []
    for processes in (1, 2):
        settings = {"calibration_blocks": 8, "per_device_train_batch_size": 4 // processes, "logging_steps": 1}
        launch = ["--config_file", str(RECIPES / "accelerate" / "ddp.yaml"), "--num_processes", str(processes)]
        command = [
            *(sys.executable, "-m", "accelerate.commands.launch", *launch, "--mixed_precision", "no"),
            str(RECIPES / "oneshot.py"),
            *text_flags(tmp_path, models / "dense", **settings, output_dir=tmp_path / f"out-{processes}"),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        assert len(re.findall(r"one-shot 2:4 by wanda", run.stdout)) == 1
        history = json.loads((tmp_path / f"out-{processes}" / "trainer_state.json").read_text())["log_history"]
        runs.append([log["loss"] for log in history if "loss" in log])
    assert runs[0] == pytest.approx(runs[1], rel=1e-4) and len(runs[0]) == 4
