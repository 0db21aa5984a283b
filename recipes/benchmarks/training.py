"""A training step of a large model's layers on a GPU: dense, T-SR-STE and S-STE by turns, as users run it."""

from functools import partial

import torch
from sparse24_kernels.gemm import GemmProblem

from .builds import training_step
from .gemms import mlp
from .sections import Row, Run, Section
from .shapes import MODELS
from .timing import Call

BATCH = (4, 2048)  # sequences and their length


class Steps(Section):
    """Random tokens and weights, fp32 masters under autocast to bf16, gradients clipped, fused AdamW; MLPs sparse.

    All ways are alive at once: 55 GB of weights, gradients and moments.
    """

    name, group = "training step", "training"
    note = "Whole steps of 4 x 2048 tokens. A mask refresh, every 40th step, is in none of them."

    def entries(self) -> list[str]:
        return ["four layers of Llama 8B", "four layers of Llama 8B, torch.compile"]

    def problems(self, entry: str) -> list[GemmProblem]:
        layers = mlp(entry.split(",")[0], BATCH[0] * BATCH[1])
        return [problem for layer in layers for problem in layer.problems().values()]

    def goals(self, entry: str) -> dict[str, float]:
        return {"t-sr-ste": 1.05, "s-ste": 1.04}

    def measure(self, run: Run, entry: str) -> Row:
        device, (model_name, _, compiler) = run.machine.device, entry.partition(", ")

        def make(method: str) -> list[Call]:
            with device:  # where it is used: a billion random numbers take a CPU too long
                torch.manual_seed(0)
                model = MODELS[model_name].build()
            step = training_step(model, BATCH, method, compiled=bool(compiler))
            for _ in range(2):  # the first ones compile, choose masks and make the optimizer's state
                step()
            return [step]

        makers = {method: partial(make, method) for method in ("dense", "t-sr-ste", "s-ste")}
        row = run.compare(makers, run.machine.eager)
        if device.type == "cuda":
            row["facts"]["peak GB, all together"] = torch.cuda.max_memory_allocated() / 1e9
        return row
