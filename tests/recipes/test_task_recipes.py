"""LoRA, and one-shot pruning with recovery, as a user runs them, on tiny models and texts."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from paths import RECIPES
from task_runs import MLP, assert_merged, results, text_flags
from transformers import AutoModelForCausalLM

from hf_sparse24 import Sparse24Config, Sparse24Linear, patch_model, sparse_weights
from hf_sparse24.metrics import is_nm_sparse

pytestmark = [
    # TRL and PEFT still use names of Transformers 4 that Transformers 5 is renaming.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.usefixtures("own_cache"),
]

peft = pytest.importorskip("peft")
pytest.importorskip("trl")

import lora  # noqa: E402
import oneshot  # noqa: E402


def eval_losses(trainer) -> list[float]:
    return [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]


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


def test_lora_on_a_dense_model_is_the_control_run(tmp_path, models):
    lora.main(text_flags(tmp_path, models / "dense", method="dense"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged")
    assert not is_nm_sparse(merged.model.layers[0].mlp.up_proj.weight)


# --- one shot, and recovery ---


def zeros(model) -> dict[str, torch.Tensor]:
    return {name: weight.mask() for name, weight in sparse_weights(model).items()}


@pytest.mark.parametrize("criterion", ["magnitude", "sparsegpt"])
def test_oneshot_prunes_and_recovers(tmp_path, models, capsys, criterion):
    reconstruct = "block" if criterion == "magnitude" else "none"
    settings = {"criterion": criterion, "reconstruct": reconstruct, "calibration_blocks": 24}
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
        assert len(re.findall(r"one-shot 2:4 by sparsegpt", run.stdout)) == 1
        history = json.loads((tmp_path / f"out-{processes}" / "trainer_state.json").read_text())["log_history"]
        runs.append([log["loss"] for log in history if "loss" in log])
    assert runs[0] == pytest.approx(runs[1], rel=1e-4) and len(runs[0]) == 4
