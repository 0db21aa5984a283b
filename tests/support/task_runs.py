"""What tests of the recipes for tasks share: flags of a tiny run, and what it leaves behind."""

import json
from pathlib import Path

import torch
from recipe_runs import TEXTS
from sparse_models import logits
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_sparse24.metrics import is_nm_sparse

MLP = ("gate_proj", "up_proj", "down_proj")


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


def results(tmp_path) -> dict:
    return json.loads((tmp_path / "out" / "all_results.json").read_text())


def assert_merged(directory: Path, adapted: torch.nn.Module, targets: tuple[str, ...]) -> None:
    """The directory holds a plain model that computes as the adapted one, with every target 2:4."""
    merged = AutoModelForCausalLM.from_pretrained(directory)
    torch.testing.assert_close(logits(merged), logits(adapted), rtol=1e-4, atol=1e-4)
    weights = {name: module.weight for name, module in merged.named_modules() if name.endswith(targets)}
    assert weights and all(is_nm_sparse(weight) for weight in weights.values())
    assert AutoTokenizer.from_pretrained(directory).eos_token == "<eos>"
