"""The recipes as `accelerate launch` and torchrun start them, at toy size on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import stdlib_text
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from paths import RECIPES, ROOT
from transformers import AutoModelForCausalLM

from hf_sparse24 import sparse_weights

KINDS = {
    "single": DistributedType.NO,
    "ddp": DistributedType.MULTI_GPU,
    "fsdp2": DistributedType.FSDP,
    "zero2": DistributedType.DEEPSPEED,
    "tp": DistributedType.MULTI_GPU,
}
TOY = [RECIPES / "pretrain" / f"{name}.yaml" for name in ("gpt2", "gpt2-toy", "toy")]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Text of twenty files and its tokenizer."""
    return stdlib_text.prepare(tmp_path_factory.mktemp("text"), vocab_size=300, max_files=60)


def flags(data: Path, output: Path, **settings: object) -> list[str]:
    """A few steps of the toy GPT-2 of the recipes, smaller still; each step sees 8 sequences, on 1 or 2 processes."""
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 128, "attn_pdrop": 0, "embd_pdrop": 0}
    settings = {
        "dataset": data / "train.jsonl",
        "validation_file": data / "validation.jsonl",
        "tokenizer_name": data / "tokenizer",
        "config_overrides": json.dumps({**sizes, "resid_pdrop": 0}),
        "sparse24": "{}",  # no FP8, whose scales are those of a process's own part
        "output_dir": output,
        "block_size": 64,
        "max_steps": 12,
        "warmup_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        **settings,
    }
    return [*map(str, TOY), *(f"--{name}={value}" for name, value in settings.items())]


def run(tmp_path: Path, *command: object) -> str:
    """What a command prints that must succeed; run from the root of the repository, as a user would."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        "HF_DATASETS_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(output: Path) -> list[float]:
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


ACCELERATE = ("accelerate.commands.accelerate_cli", "launch", "--mixed_precision", "no", "--config_file")
SCRIPT = RECIPES / "train.py"


@pytest.mark.parametrize("name", KINDS)
def test_accelerate_reads(name):
    config = load_config_from_file(str(RECIPES / "accelerate" / f"{name}.yaml"))
    assert config.distributed_type == KINDS[name] and config.mixed_precision == "bf16"
    if name == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
    if name == "zero2":
        assert config.deepspeed_config["zero_stage"] == 2


@pytest.fixture(scope="module")
def single(tmp_path_factory, data) -> Path:
    """What one process trains by a method without random gradients."""
    folder = tmp_path_factory.mktemp("single")
    command = (*ACCELERATE, RECIPES / "accelerate" / "single.yaml", "--cpu", SCRIPT)
    run(folder, *command, *flags(data, folder / "out", method="sr-ste"))
    return folder / "out"


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path, data, single):
    """`single` and `ddp` of one recipe: the same losses, to rounding."""
    double = flags(data, tmp_path / "ddp", method="sr-ste", per_device_train_batch_size=4)
    processes = ("--num_processes", 2, "--main_process_port", 0)
    out = run(tmp_path, *ACCELERATE, RECIPES / "accelerate" / "ddp.yaml", *processes, SCRIPT, *double)
    assert out.count("2:4 sparse by sr-ste") == 1  # the first process alone prints
    expected, actual = losses(single), losses(tmp_path / "ddp")
    assert expected[-1] < expected[0] - 0.3
    assert actual == pytest.approx(expected, abs=1e-3)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ddp")
    assert len(sparse_weights(loaded)) == 4


@pytest.mark.slow
def test_fsdp2_on_a_cpu_trains_as_one_process_does(tmp_path, data, single):
    """By `--distributed`, which accelerate's way cannot: it turns FSDP on a CPU into DDP."""
    sharded = {"method": "sr-ste", "per_device_train_batch_size": 4, "distributed": json.dumps({"fsdp_size": 2})}
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2, SCRIPT)
    run(tmp_path, *torchrun, *flags(data, tmp_path / "fsdp2", **sharded))
    assert losses(tmp_path / "fsdp2") == pytest.approx(losses(single), abs=1e-3)
    whole, gathered = map(AutoModelForCausalLM.from_pretrained, (single, tmp_path / "fsdp2"))
    assert sparse_weights(gathered).keys() == sparse_weights(whole).keys()
    for name, parameter in whole.named_parameters():
        assert torch.allclose(gathered.get_parameter(name), parameter, atol=2e-3), name
