"""Short, quiet runs of the Trainer on a CPU."""

from pathlib import Path
from typing import Any

import torch
import zoo
from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel, TrainingArguments

from hf_sparse24 import Sparse24Config, Sparse24Trainer


def arguments(
    directory: str | Path, kind: type[TrainingArguments] = TrainingArguments, **overrides: Any
) -> TrainingArguments:
    """Those of four steps that log each step and save nothing."""
    defaults = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return kind(str(directory), **(defaults | overrides))


def dataset(rows: int = 32) -> Dataset:
    """Rows of random tokens."""
    return Dataset.from_dict({name: ids.tolist() for name, ids in zoo.batch(rows=rows).items()})


def train(
    directory: str | Path, model: PreTrainedModel | None = None, config: Sparse24Config | None = None, **overrides: Any
) -> Sparse24Trainer:
    """The trainer of a finished run, of a llama unless a model is given."""
    run = Sparse24Trainer(
        model or zoo.build("llama"), arguments(directory, **overrides), train_dataset=dataset(), sparse24_config=config
    )
    run.train()
    return run


def decay_trainer(
    directory: str | Path, decay: float | str = 1e-3, method: str = "sr-ste", **overrides: Any
) -> Sparse24Trainer:
    """One of twelve steps, to search its masked decay."""
    defaults = {"max_steps": 12, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    return Sparse24Trainer(
        zoo.build("llama"),
        arguments(directory, **(defaults | overrides)),
        train_dataset=dataset(64),
        sparse24_config=Sparse24Config(method=method, masked_decay=decay),
    )


def weights(model: nn.Module) -> torch.Tensor:
    """All parameters as one vector."""
    return torch.cat([parameter.detach().flatten().float() for parameter in model.parameters()])
