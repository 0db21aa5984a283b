"""The recipes run as a user runs them, on tiny models and texts."""

import io
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import mask_quality
import methods
import pytest
import quickstart
import recover
import stdlib_text
import text_data
import torch
import train
import yaml
import zoo
from arguments import parse_arguments, read_yaml
from datasets import Dataset
from paths import RECIPES
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Trainer

from hf_sparse24 import Sparse24Linear, Sparse24Trainer

TEXTS = [f"def function_{i}(a, b):\n    return a * {i} + b\n" * 6 for i in range(30)]
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
LLAMA = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 32}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    # datasets 5 waits 5 s whenever a shuffled Parquet stream ends.
    monkeypatch.setattr("datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN", 0.1, raising=False)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("tokenizer")
    stdlib_text.train_tokenizer(TEXTS, 300).save_pretrained(directory)
    return str(directory)


@pytest.fixture
def text_file(tmp_path) -> str:
    path = tmp_path / "train.txt"
    path.write_text("".join(TEXTS))
    return str(path)


def flags(tmp_path, dataset, tokenizer, model_type="llama", overrides=LLAMA, **settings) -> list[str]:
    settings = {
        "dataset": dataset,
        "tokenizer_name": tokenizer,
        "model_type": model_type,
        "config_overrides": json.dumps(overrides),
        "block_size": 16,
        "output_dir": tmp_path / "out",
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **settings,
    }
    return [f"--{name}={value}" for name, value in settings.items() if value is not None]


def jsonl(path: Path, texts=TEXTS, column="text") -> str:
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    return str(path)


# --- data ---


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
    own_file = train.main(flags(tmp_path, text_file, tokenizer, validation_file=jsonl(tmp_path / "v.jsonl", TEXTS[:5])))
    assert 0 < len(own_file.eval_dataset) < len(own_file.train_dataset)
    few = train.main(flags(tmp_path, jsonl(tmp_path / "t.jsonl"), tokenizer, max_samples=3))
    assert len(few.train_dataset) < train_blocks / 5


# --- models and methods ---


@pytest.mark.parametrize("model_type", ["bert", "distilbert"])
def test_masked(tmp_path, tokenizer, text_file, model_type):
    sizes = zoo.MASKED[model_type]
    settings = {"objective": "masked", "mlm_probability": 0.3, "validation_split": 0.1}
    trainer = train.main(flags(tmp_path, text_file, tokenizer, model_type, {**sizes, "pad_token_id": 1}, **settings))
    batch = next(iter(trainer.get_train_dataloader()))
    assert 0 < (batch["labels"] != -100).float().mean() < 0.6
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


def test_method_settings(tmp_path, tokenizer, text_file):
    sparse24 = json.dumps({"mask_interval": 1, "dense_tail": 0, "masked_decay": 1e-3})
    arguments = flags(tmp_path, text_file, tokenizer, method="t-sr-ste", sparse24=sparse24)
    trainer = train.main([*arguments, "--target_modules", "gate_proj", "up_proj"])
    assert [name.rpartition(".")[2] for name in trainer.patch_report.patched] == ["gate_proj", "up_proj"]
    assert trainer.patch_report.config.masked_decay == 1e-3


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


def test_recovery(tmp_path, tokenizer, capsys, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tokenizer").symlink_to(tokenizer)
    for name in ("train", "validation"):
        jsonl(tmp_path / "data" / f"{name}.jsonl")
    monkeypatch.setattr(stdlib_text, "prepare", lambda directory: directory)
    monkeypatch.setattr(recover, "WAYS", dict(list(recover.WAYS.items())[:3]))
    monkeypatch.setattr(recover, "LLAMA", LLAMA | {"max_position_embeddings": 128})
    recover.main(["--dense_steps=2", "--steps=2", "--seeds=0", f"--data={tmp_path / 'data'}", f"--output={tmp_path}"])
    table = capsys.readouterr().out.splitlines()[-5:]
    assert [line.split("|")[1].strip() for line in table] == ["dense", "pruned by oneshot", *recover.WAYS]
    assert all(3 < float(line.split("|")[2]) < 8 for line in table)


def test_same_start_as_the_dense_control(tmp_path, tokenizer, text_file):
    runs = [
        train.make_trainer(*parse_arguments(train.ARGUMENTS, flags(tmp_path, text_file, tokenizer, method=method)))
        for method in ("dense", "s-ste")
    ]
    for dense, sparse in zip(*(run.model.parameters() for run in runs), strict=True):
        assert torch.equal(dense, sparse)
    assert runs[0].train_dataset[:]["input_ids"] == runs[1].train_dataset[:]["input_ids"]


@pytest.mark.parametrize("method", ["s-ste", "t-sr-ste"])
def test_resumed_equals_uninterrupted(tmp_path, tokenizer, text_file, method):
    settings = {"method": method, "max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = train.main(flags(tmp_path, text_file, tokenizer, **settings))
    expected = load_file(tmp_path / "out" / "model.safetensors")
    (tmp_path / "out" / "checkpoint-6").rename(tmp_path / "elsewhere")
    for resume in ("true", tmp_path / "out" / "checkpoint-3"):
        resumed = train.main(flags(tmp_path, text_file, tokenizer, **settings, resume_from_checkpoint=resume))
        actual = load_file(tmp_path / "out" / "model.safetensors")
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name]) for name in expected)
        assert resumed.state.global_step == whole.state.global_step == 6
        if resume == "true":
            (tmp_path / "out" / "checkpoint-6").rename(tmp_path / "elsewhere-too")


def test_a_second_run_does_not_mix_its_checkpoints_with_the_first(tmp_path, tokenizer, text_file):
    saving = {"save_strategy": "steps", "save_steps": 2}
    train.main(flags(tmp_path, text_file, tokenizer, **saving))
    with pytest.raises(ValueError, match="holds checkpoint-2 of an earlier run; --resume_from_checkpoint true goes on"):
        train.main(flags(tmp_path, text_file, tokenizer, **saving))
    train.main(flags(tmp_path, text_file, tokenizer))  # saves no checkpoints
    resumed = flags(tmp_path, text_file, tokenizer, **saving | {"max_steps": 4, "resume_from_checkpoint": "true"})
    assert train.main(resumed).state.global_step == 4


# --- arguments ---


def test_yaml_and_flags_on_top(tmp_path, tokenizer, text_file):
    settings = {"dataset": text_file, "model_type": "llama", "config_overrides": LLAMA, "tokenizer_name": tokenizer}
    settings |= {"target_modules": "attention", "sparse24": {"weight_grad": "dense"}, "max_steps": 3, "use_cpu": True}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings) + "learning_rate: 1e-3\nbf16: false\ndataset_config: null\n")
    model_args, _, data_args, sparse_args, _, training_args = parse_arguments(
        train.ARGUMENTS, [str(path), "--max_steps", "7"]
    )
    assert (training_args.max_steps, training_args.learning_rate, training_args.bf16) == (7, 1e-3, False)
    assert model_args.config_overrides == LLAMA
    assert (data_args.dataset, data_args.dataset_config) == (text_file, None)
    assert sparse_args.make_config().target_modules == "attention"
    assert sparse_args.make_config().weight_grad == "dense"
    path.write_text(yaml.safe_dump(settings | {"target_modules": ["up_proj", "down_proj"]}))
    assert parse_arguments(train.ARGUMENTS, [str(path)])[3].make_config().target_modules == ["up_proj", "down_proj"]


@pytest.mark.parametrize("number", ["1e-4", "1E-4", "1.e-4", "0.1e-3", ".1e-3", "+1e-4", "1.0e-4", "0.0001"])
def test_numbers_of_a_yaml_file_are_numbers_at_every_depth(tmp_path, number):
    path = tmp_path / "config.yaml"
    path.write_text(f"sparse24:\n  masked_decay: {number}\n  list: [{number}, e4, 1e, 3]\n")
    assert read_yaml(str(path), train.ARGUMENTS) == {"sparse24": {"masked_decay": 1e-4, "list": [1e-4, "e4", "1e", 3]}}


def test_help_shows_the_flags_of_the_script(capsys):
    shown = {}
    for flag in ("-h", "--help", "--help-all"):
        with pytest.raises(SystemExit) as stopped:
            parse_arguments(train.ARGUMENTS, [flag])
        assert stopped.value.code == 0
        shown[flag] = capsys.readouterr().out
    assert shown["-h"] == shown["--help"] and len(shown["-h"].splitlines()) < 80
    assert all(flag in shown["-h"] for flag in ("--dataset", "--sparse24", "--objective", "--help-all"))
    assert "--neftune_noise_alpha" not in shown["-h"] and "--neftune_noise_alpha" in shown["--help-all"]


@pytest.mark.parametrize(
    ("content", "message"),
    [("max_stepz: 3\n", r"unknown keys \['max_stepz'\]"), ("- a\n- b\n", "must be a mapping")],
)
def test_wrong_yaml(tmp_path, content, message):
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        parse_arguments(train.ARGUMENTS, [str(path)])
    with pytest.raises(ValueError, match="no such file"):
        parse_arguments(train.ARGUMENTS, [str(tmp_path / "absent.yaml")])


def test_wrong_type_in_yaml(tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text("block_size: 12.5\n")
    with pytest.raises(SystemExit):
        parse_arguments(train.ARGUMENTS, [str(path)])
    assert "--block_size/--block-size: invalid int value: '12.5'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"dataset": None}, ValueError, "dataset is missing"),
        ({"dataset": "absent.txt"}, ValueError, "absent.txt: no such file"),
        ({"dataset": "./absent/*.txt"}, ValueError, r"absent/\*.txt: no such file"),
        ({"validation_file": "/absent.jsonl"}, ValueError, "/absent.jsonl: no such file"),
        ({"text_column": "body"}, ValueError, r"text_column='body': .*train.txt has the columns \['text'\]"),
        ({"text_column": "body", "streaming": True}, ValueError, r"has the columns \['text'\]"),
        ({"model_name_or_path": "gpt2"}, ValueError, "both of model_name_or_path"),
        ({"model_type": None, "config_overrides": None}, ValueError, "neither of model_name_or_path"),
        ({"model_type": None, "model_name_or_path": "gpt2"}, ValueError, "config_overrides is for model_type"),
        ({"model_type": "lama"}, ValueError, "model_type='lama': must be one of"),
        ({"overrides": {"hiden_size": 16}}, ValueError, r"\['hiden_size'\] are no fields of LlamaConfig"),
        ({"config_overrides": "{hidden_size: 16}"}, ValueError, "config_overrides=.*: not JSON"),
        ({"config_overrides": "[16]"}, ValueError, "must be a JSON object"),
        ({"overrides": {**LLAMA, "vocab_size": 200}}, ValueError, "the tokenizer has 300 tokens, the model embeds 200"),
        ({"tokenizer_name": None}, ValueError, "model_type='llama' needs tokenizer_name"),
        ({"objective": "prefix"}, ValueError, "objective='prefix': must be one of causal, masked"),
        ({"dtype": "int8"}, ValueError, "dtype='int8': must be one of float32, bfloat16"),
        ({"distillation": "{}", "teacher": "t", "method": "dense"}, ValueError, "teacher is for sparse methods"),
        ({"distillation": '{"weight": 1}'}, ValueError, "distillation is for a teacher"),
        ({"distillation": '{"wait": 1}', "teacher": "t"}, ValueError, r"\['wait'\] are no fields of Distillation"),
        ({"distillation": '{"weight": 2}', "teacher": "t"}, ValueError, "weight=2: must be in"),
        ({"method": "magic"}, ValueError, "method='magic': must be one of dense, fixed-mask, .*s-ste"),
        ({"sparse24": '{"patern": "2:4"}'}, ValueError, r"unknown keys in a Sparse24Config: \['patern'\]"),
        ({"block_size": 64}, ValueError, "sequences of 64 tokens: the model has 32 positions"),
        ({"block_size": 1}, ValueError, "block_size=1: must be at least 2"),
        ({"validation_split": "1.5"}, ValueError, "validation_split='1.5': a fraction must be between 0 and 1"),
        ({"validation_split": 0.1, "streaming": True}, ValueError, "a stream has no length"),
        ({"validation_split": 0.1, "validation_file": "x.txt"}, ValueError, "both of validation_file"),
        ({"validation_split": 0.9999}, ValueError, "validation_split=0.9999: leaves nothing of"),
        ({"distributed": '{"tp": 2}'}, ValueError, r"distributed: \['tp'\] are no fields of DistributedConfig"),
        ({"typo": 1}, ValueError, "typo"),
    ],
)
def test_clear_errors(tmp_path, tokenizer, text_file, settings, error, message):
    settings = {"dataset": text_file, "tokenizer": tokenizer, **settings}
    if "tokenizer_name" in settings:
        settings["tokenizer"] = settings.pop("tokenizer_name")
    with pytest.raises(error, match=message):
        train.make_trainer(*parse_arguments(train.ARGUMENTS, flags(tmp_path, **settings)))


@pytest.mark.parametrize("streaming", [False, True])
def test_too_little_text(tmp_path, tokenizer, streaming):
    arguments = flags(tmp_path, jsonl(tmp_path / "t.jsonl", ["abc", *[""] * 20, "xy"]), tokenizer, streaming=streaming)
    with pytest.raises(ValueError, match="the text has 7 tokens, less than one block"):
        train.main(arguments)
    (tmp_path / "t.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"t\.jsonl: empty, there is no text in it"):
        train.main(arguments)


def test_mixed_directory(tmp_path, tokenizer):
    directory = tmp_path / "mixed"
    directory.mkdir()
    jsonl(directory / "a.jsonl")
    (directory / "b.txt").write_text("text")
    with pytest.raises(ValueError, match=r"holds files of several kinds \(json, text\)"):
        train.main(flags(tmp_path, directory, tokenizer))


@pytest.mark.parametrize(
    ("missing", "objective", "message"),
    [("eos_token", "causal", "has no eos_token"), ("mask_token", "masked", "has no mask_token")],
)
def test_tokenizer_lacks_a_token(tmp_path, tokenizer, text_file, missing, objective, message):
    tokens = {name: token for name, token in stdlib_text.SPECIAL_TOKENS.items() if name != missing}
    tokenizer_object = AutoTokenizer.from_pretrained(tokenizer).backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=tokenizer_object, **tokens).save_pretrained(tmp_path / "lacking")
    with pytest.raises(ValueError, match=message):
        train.main(flags(tmp_path, text_file, tmp_path / "lacking", objective=objective))


# --- the standard library's text, and the quickstart ---


def test_stdlib_text_is_cached_and_deterministic(tmp_path):
    first = stdlib_text.prepare(tmp_path / "a", vocab_size=300, max_files=100)
    files = ["train.jsonl", "validation.jsonl", "tokenizer/tokenizer.json"]
    contents = [(first / name).read_bytes() for name in files]
    stamps = [(first / name).stat().st_mtime_ns for name in files]
    stdlib_text.prepare(tmp_path / "a", vocab_size=300, max_files=100)
    assert [(first / name).stat().st_mtime_ns for name in files] == stamps
    again = stdlib_text.prepare(tmp_path / "b", vocab_size=300, max_files=100)
    assert [(again / name).read_bytes() for name in files] == contents
    assert [content.count(b"\n") for content in contents[:2]] == [98, 2]
    (first / "manifest.json").unlink()  # as an interrupted run leaves it
    (first / "train.jsonl").write_text("half")
    stdlib_text.prepare(tmp_path / "a", vocab_size=300, max_files=100)
    assert [(first / name).read_bytes() for name in files] == contents
    tokenizer = AutoTokenizer.from_pretrained(first / "tokenizer")
    text = "def f(a):\n    return 'é' + a\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    with pytest.raises(ValueError, match=r"vocab_size=100: .* at least 260"):
        stdlib_text.prepare(tmp_path / "c", vocab_size=100)


TINY = [
    "--max_steps=4",
    "--eval_steps=2",
    "--logging_steps=1",
    "--per_device_train_batch_size=2",
    "--disable_tqdm=true",
    "--dataloader_pin_memory=false",
    f"--config_overrides={json.dumps({**LLAMA, 'max_position_embeddings': 256})}",
]


def in_this_process(command: list[str], **_) -> SimpleNamespace:
    """What `subprocess.run` gives for a Python script, without the seconds that its imports take."""
    printed, ended_with = io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(sys, "argv", command[1:])
        try:
            runpy.run_path(command[1], run_name="__main__")
        except SystemExit as end:
            ended_with = end.code
    return SimpleNamespace(returncode=int(ended_with != 0), stdout=printed.getvalue(), stderr=str(ended_with))


def test_quickstart_twice_and_its_loud_failures(tmp_path, capsys, monkeypatch):
    arguments = [*TINY, f"--output_dir={tmp_path / 'out'}"]
    for _ in range(2):
        quickstart.main(arguments, data=str(tmp_path / "data"), max_files=50)
        out = capsys.readouterr().out
        assert "reload check passed" in out and "export check passed" in out and "\ndef " in out
        assert "50.0% of the 2:4 weights" in out
        dense, packed = (int(re.search(rf"{kind} export +(\d+) kB", out)[1]) for kind in ("dense", "packed"))
        assert packed < dense
        assert (tmp_path / "out" / "training.png").stat().st_size > 10_000
        assert f"report             {tmp_path / 'out' / 'report.html'}\n" in out
        assert '<g class="cells" data-row="gate_proj"' in (tmp_path / "out" / "report.html").read_text()
        # The first run has shown that a fresh process loads it.
        monkeypatch.setattr(quickstart, "subprocess", SimpleNamespace(run=in_this_process))

    arguments = flags(tmp_path, tmp_path / "data/train.jsonl", tmp_path / "data/tokenizer", validation_split=0.1)
    trainer = train.make_trainer(*parse_arguments(train.ARGUMENTS, arguments))
    trainer.save_model(tmp_path / "damaged")
    with torch.no_grad():
        trainer.model.lm_head.weight[0, 0] += 1
    with pytest.raises(SystemExit, match="reload check FAILED"):
        quickstart.check_reload(trainer, tmp_path / "damaged")
    monkeypatch.setattr(quickstart, "export_model", lambda model, path, *_: plain_copy(model, path))
    with pytest.raises(SystemExit, match="packed check FAILED"):
        quickstart.check_packed(trainer, tmp_path / "not-packed")
    with pytest.raises(SystemExit, match=r"export check FAILED: not 2:4 in .*: model.layers.0.mlp.gate_proj"):
        quickstart.check_export(trainer, tmp_path / "not-sparse")


def plain_copy(model, path):
    copy = AutoModelForCausalLM.from_config(type(model.config)(**{**LLAMA, "vocab_size": model.config.vocab_size}))
    copy.save_pretrained(path)


def test_quickstart_interrupted(tmp_path):
    command = [sys.executable, str(RECIPES / "quickstart.py"), *TINY, "--max_steps=100000", "--output_dir=out"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "runs/stdlib_text/manifest.json").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in errors and "Traceback" not in errors


def test_methods_page(tmp_path, capsys, monkeypatch):
    """Runs are kept and not repeated; the page tells what is there, the reverse of a claim included."""
    stdlib_text.prepare(tmp_path / "text", 300, max_files=60)
    results = tmp_path / "results" / "methods"
    common = ["--results", str(results), "--data", str(tmp_path / "text"), "--steps", "10"]
    monkeypatch.setattr(methods, "START", methods.LEARNING_RATES[3:4])
    monkeypatch.setattr(methods, "LEARNING_RATES", methods.START)
    monkeypatch.setattr(methods, "SEEDS", (0,))
    monkeypatch.setattr(methods, "RATE_OF", {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stdlib_text, "prepare", lambda directory: directory)
        methods.main([*common, "--only", "dense"])
        methods.main([*common, "--only", "dense", "ste", "--shard", "1/2"])
        (rate,) = methods.START
        dense, ste = (results / f"{variant}-lr{rate:g}-seed0.json" for variant in ("dense", "ste"))
        assert set(results.iterdir()) == {dense, ste}
        before = ste.stat().st_mtime_ns
        methods.main([*common, "--only", "ste"])
    assert ste.stat().st_mtime_ns == before
    saved = json.loads(ste.read_text())
    assert saved["sparse24"]["method"] == "ste" and saved["eval_loss"] > 0 and saved["steps"] == [5, 10]
    assert saved["tokens"] == 10 * 8 * 128 and saved["model"] == "llama"
    # A made-up sr-ste run that is worse than ste: a claim that does not hold must be said not to.
    saved |= {"variant": "sr-ste", "eval_loss": saved["eval_loss"] + 1}
    (results / f"sr-ste-lr{rate:g}-seed0.json").write_text(json.dumps(saved))
    methods.main([*common, "--report"])
    page = (tmp_path / "results" / "methods.md").read_text()
    assert (
        f"| `ste` | magnitude masks, straight-through, at `sr-ste`'s learning rate | {rate:g} |" in page
        and "from 3 runs" in page
    )
    assert (tmp_path / "results" / "methods.png").stat().st_size > 0
    assert "- `sr-ste` below `ste` (SR-STE, section 3): **not seen**: the reverse (1 seed, by -1.000)" in page


def test_mask_quality_table():
    lines = mask_quality.table(32, 0).splitlines()
    assert len(lines) == 2 + 3 * 5
    best = [line for line in lines if "| exact |" in line]
    assert all("| 1.0000 |" in line for line in best)
