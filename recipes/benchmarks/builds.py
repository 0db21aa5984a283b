"""Models that the benchmarks build, patch, train and export. It imports Transformers late: processes time that."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .variants import ROOT

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FORMATS = {"dense": {"format": "dense"}, "packed": {"format": "packed"}}
FORMATS |= {"packed int8": {"format": "packed", "values": "int8"}}
"""Settings of an export by the name of its row."""

LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
LLAMA |= {"num_key_value_heads": 8, "vocab_size": 32000}
"""The layers of Llama 3.2 1B with a vocabulary of 32000: 1.1B parameters."""

SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
SMALL |= {"vocab_size": 4096}
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "vocab_size": 512}
TIED = {"tie_word_embeddings": True}
RANDOM = {"Llama-1B": LLAMA | TIED, "small Llama": SMALL, "tiny Llama": TINY | TIED}
"""Settings of models with random weights."""

SMOLLM2 = "SmolLM2-135M"


def smollm2() -> Path:
    """The folder with SmolLM2-135M-Instruct in fp32, as recipes/pretrained/material.py makes it of pinned packages."""
    from recipes.pretrained import material

    made = ROOT / "runs/pretrained"
    if not (made / SMOLLM2).exists():
        material.smollm2(made / SMOLLM2, material.packages(made / "packages"))
    return made / SMOLLM2


def build(model: Any) -> Any:
    """A model in fp32: of a folder, SMOLLM2, one of RANDOM, or random weights of a configuration."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    if model == SMOLLM2 or isinstance(model, Path):
        return AutoModelForCausalLM.from_pretrained(smollm2() if model == SMOLLM2 else model, dtype=torch.float32)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**RANDOM[model]) if isinstance(model, str) else model)


def export(name: str, dtype: str, way: str, folder: Path) -> Path:
    """The folder with an export of a model, pruned by magnitude; made unless it is there."""
    from hf_sparse24 import Sparse24Config, export_model, patch_model

    path = folder.resolve() / f"{name} {dtype} {way}".replace(" ", "-")
    if not (path / "config.json").exists():
        model = build(name).to(DTYPES[dtype])
        patch_model(model, Sparse24Config(method="ste", target_modules="all-linear"))
        export_model(model, path, **FORMATS[way])
    return path


def random_ids(config: Any, *shape: int) -> Tensor:
    return torch.randint(3, config.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def training_step(model: Any, batch: tuple[int, int], method: str, **config: Any) -> Callable[[], float]:
    """A step of a model's training, which it is patched for unless the method is "dense"; it returns the loss."""
    from hf_sparse24 import Sparse24Config, Sparse24Controller, patch_model, sparse_run
    from hf_sparse24.methods import step_param_groups

    model.train()
    if method != "dense":
        # STEP switched after its first step: what it costs while it is sparse.
        settings = {"switch_after": 1, "switch_by": 1} if method == "step" else {}
        patch_model(model, Sparse24Config(method=method, **settings, **config))
    run = sparse_run(model)
    special = run and run.method.make_optimizer(step_param_groups(model), total_steps=100_000, lr=1e-4)
    optimizer = special or torch.optim.AdamW(model.parameters(), lr=1e-4)
    if run:
        Sparse24Controller(model, optimizer, total_steps=100_000, metrics_interval=10)
    ids = random_ids(model.config, *batch)

    def step() -> float:
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def clock(times: list[float], now: Callable[[], float] = time.perf_counter) -> Callable[..., Tensor]:
    """A stopping criterion of `generate` that never stops: it adds the time after every token to `times`."""

    def note(input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        times.append(now())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    return note
