"""Short runs of any registered method, with the Trainer or in a loop, from which every method learns something."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import training_runs
import zoo
from datasets import Dataset
from torch import nn

from hf_sparse24 import Sparse24Config, Sparse24Controller, Sparse24Trainer
from hf_sparse24.methods import METHODS, is_length, is_positive_length, step_param_groups
from hf_sparse24.run import sparse_run

STEPS = 12
every_method = pytest.mark.parametrize("method", sorted(METHODS))


def short_lengths(method: str) -> dict[str, int]:
    """What is longer than a short run, as a number of steps; fractions of the run are short in any case."""
    lengths = [
        f for f in fields(METHODS[method].Settings) if f.metadata.get("check") in (is_length, is_positive_length)
    ]
    return {field.name: 2 for field in lengths if isinstance(field.default, int) and field.default > 2}


def method_config(method: str, **settings: Any) -> Sparse24Config:
    return Sparse24Config(method=method, target_modules="all-linear", **short_lengths(method) | settings)


def dataset(rows: int = 64) -> Dataset:
    """Sequences that count upwards: something to learn within a few steps."""
    starts = torch.randint(3, zoo.VOCAB - 16, (rows,), generator=torch.Generator().manual_seed(1))
    ids = (starts[:, None] + torch.arange(12)).tolist()
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def trainer(model: nn.Module, directory: str | Path, method: str, **overrides: Any) -> Sparse24Trainer:
    """One of `STEPS` steps of two micro-batches."""
    defaults = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "seed": 5,
    }
    if method == "ast":  # its steps are longer than Adam's, the more so at the start
        defaults |= {"adam_beta1": 0.5, "learning_rate": 2.5e-2}
    args = training_runs.arguments(directory, **(defaults | overrides))
    return Sparse24Trainer(model, args, train_dataset=dataset(), sparse24_config=method_config(method))


def loop(model: nn.Module, lr: float = 1e-2) -> tuple[torch.optim.Optimizer, Sparse24Controller]:
    """The optimizer and the controller of a loop without a Trainer, as a method wants them."""
    method, groups = sparse_run(model).method, step_param_groups(model, 0.0)
    optimizer = method.make_optimizer(groups, total_steps=STEPS, lr=lr) or torch.optim.AdamW(groups, lr=lr)
    return optimizer, Sparse24Controller(model, optimizer, total_steps=STEPS)


def run_steps(model: nn.Module, optimizer: torch.optim.Optimizer, controller: Sparse24Controller, steps: int) -> None:
    """Optimizer steps of two micro-batches, the same ones every time."""
    for _ in range(steps):
        for micro_step in range(2):
            model(**zoo.batch(micro_step)).loss.backward()
            controller.after_micro_step()
        optimizer.step()
        optimizer.zero_grad()
