"""The quickstart, the text that it trains on, and the pages of the comparison of methods."""

import io
import json
import re
import runpy
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout, suppress
from types import SimpleNamespace

import pytest
import quickstart
import stdlib_text
import torch
import train
from arguments import parse_arguments
from paths import RECIPES
from recipe_runs import LLAMA, flags
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.usefixtures("own_cache")


def test_stdlib_text_is_cached_and_deterministic(tmp_path):
    first = stdlib_text.prepare(tmp_path / "a", vocab_size=300, max_files=50)
    files = ["train.jsonl", "validation.jsonl", "tokenizer/tokenizer.json"]
    contents = [(first / name).read_bytes() for name in files]
    stamps = [(first / name).stat().st_mtime_ns for name in files]
    stdlib_text.prepare(tmp_path / "a", vocab_size=300, max_files=50)
    assert [(first / name).stat().st_mtime_ns for name in files] == stamps
    again = stdlib_text.prepare(tmp_path / "b", vocab_size=300, max_files=50)
    assert [(again / name).read_bytes() for name in files] == contents
    assert [content.count(b"\n") for content in contents[:2]] == [49, 1]
    (first / "manifest.json").unlink()  # as an interrupted run leaves it
    (first / "train.jsonl").write_text("half")
    stdlib_text.prepare(tmp_path / "a", vocab_size=300, max_files=50)
    assert [(first / name).read_bytes() for name in files] == contents
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_quickstart_interrupted(tmp_path):
    # Of few files, where the script looks for the text of all.
    manifest = stdlib_text.prepare(tmp_path / "runs/stdlib_text", 300, max_files=50) / "manifest.json"
    written = json.loads(manifest.read_text())
    written["settings"] |= {"vocab_size": 2048, "max_files": None}
    manifest.write_text(json.dumps(written))
    command = [sys.executable, str(RECIPES / "quickstart.py"), *TINY, "--max_steps=100000", "--output_dir=out"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "out").exists():  # datasets 4.0 turns an interrupt into another error while it loads
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    try:
        for _ in range(6):  # Python ignores an interrupt within a callback of the garbage collector
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                _, errors = process.communicate(timeout=20)
                break
    finally:
        process.kill()  # nothing where it has ended
    assert process.returncode == 130, errors[-2000:]
    assert "interrupted" in errors and ("Traceback" not in errors or "Exception ignored in" in errors)
