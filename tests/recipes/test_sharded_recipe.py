"""recipes/sharded.py under torchrun: FSDP2 and tensor parallelism, a worker that is killed, another number of them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import zoo
from paths import ROOT
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hf_sparse24 import sparse_weights
from hf_sparse24_command import main

SIZES = {key: value for key, value in zoo.CAUSAL["llama"].items() if not key.endswith("token_id")}


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """A tokenizer of words, some text, and a model of a few thousand weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("data")
    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(60))])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder / "tokenizer")
    rows = [{"text": " ".join(f"w{(i * j + j) % 60}" for j in range(40))} for i in range(60)]
    (folder / "text.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = {
        "dataset": folder / "text.jsonl",
        "tokenizer_name": folder / "tokenizer",
        "block_size": 16,
        "model_type": "llama",
        "config_overrides": json.dumps(SIZES),
        "method": "t-sr-ste",
        "sparse24": json.dumps({"mask_interval": 2, "dense_tail": 0, "weight_grad": "dense"}),
        "target_modules": "all-linear",
        "max_steps": 12,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "save_steps": 4,
        "use_cpu": True,
    }
    return [f"--{name}={value}" for name, value in given.items()]


def start(flags, output, processes, *more, restarts=2) -> subprocess.Popen:
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    script = [f"--max-restarts={restarts}", "recipes/sharded.py", *flags, f"--output_dir={output}", *more]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    # Otherwise restarted workers may read the addresses of those before them (pytorch/pytorch#135712).
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *command, *script], cwd=ROOT, env=env, **pipes)


def finish(process: subprocess.Popen) -> str:
    try:
        output = process.communicate(timeout=300)[0]
    finally:
        process.terminate()  # torchrun then ends its workers; nothing where it has ended itself
        process.wait()
    assert process.returncode == 0, output[-6000:]
    return output


def weights(folder) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder / "final").state_dict())


def assert_close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-4)
        else:
            assert (ours[name] == tensor).float().mean() > 0.99  # rounding flips what is next to a tie


@pytest.fixture(scope="module")
def uninterrupted(flags, tmp_path_factory):
    """What two processes with FSDP2 make of it."""
    folder = tmp_path_factory.mktemp("fsdp2")
    log = finish(start(flags, folder, 2))
    losses = [float(loss) for loss in re.findall(r"12/12 .*loss=([0-9.]+)", log)]
    assert losses and losses[-1] < 4.0  # ln 63 = 4.14 at the start
    return folder


@pytest.mark.slow
def test_fsdp2(uninterrupted):
    assert sparse_weights(AutoModelForCausalLM.from_pretrained(uninterrupted / "final"))
    assert main(["verify", str(uninterrupted / "export")]) == 0


@pytest.mark.slow
def test_a_worker_that_is_killed_and_restarted(flags, uninterrupted, tmp_path):
    process = start(flags, tmp_path, 2)
    deadline = time.monotonic() + 120
    while not (tmp_path / "checkpoint-4").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(workers(process.pid)[-1], signal.SIGKILL)
    finish(process)
    ours, theirs = weights(tmp_path), weights(uninterrupted)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def workers(parent: int) -> list[int]:
    """The processes that torchrun has started."""
    children = [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return sorted(pid for pid in children if b"sharded.py" in Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.mark.slow
def test_going_on_in_one_process(flags, uninterrupted, tmp_path):
    (tmp_path / "checkpoint-4").symlink_to(uninterrupted / "checkpoint-4")
    finish(start(flags, tmp_path, 1, "--per_device_train_batch_size=4"))
    assert_close(weights(tmp_path), weights(uninterrupted))


@pytest.mark.slow
def test_going_on_with_another_method(flags, uninterrupted, tmp_path):
    (tmp_path / "checkpoint-4").symlink_to(uninterrupted / "checkpoint-4")
    process = start(flags, tmp_path, 2, "--method=s-ste", "--sparse24={}", restarts=0)
    output = process.communicate(timeout=300)[0]
    assert process.returncode and "method='s-ste': " in output and "is of 't-sr-ste'; go on with that one" in output


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--method=dense", "train.py makes the control run"),
        ("--max_steps=0", "max_steps=0: must be given"),
        ("--streaming=true", "fp16 and streaming are for train.py"),
    ],
)
def test_wrong_flags(flags, tmp_path, flag, message, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "recipes")
    import sharded

    with pytest.raises(ValueError, match=message):
        sharded.main([*flags, f"--output_dir={tmp_path}", "--sparse24={}", flag])
