"""Training on a GPU: steps, one layer, and memory. Dense and sparse are built, compiled and fed alike."""

import re
from dataclasses import dataclass
from functools import partial
from math import prod

import torch
from sparse24_kernels.gemm import GemmProblem

from .builds import training_step
from .cpu_training import layer
from .gemms import Layer, linear_layers, mlp
from .sections import Row, Run, Section
from .shapes import MODELS
from .timing import Call, spread

BATCHES = {"Llama": (4, 2048), "GPT-2": (8, 1024)}
"""Sequences and their length, by kind of model."""
WAYS = ("dense", "t-sr-ste", "s-ste")
ROUNDS, STEPS = 3, 2
SPARSE_GEMM = re.compile(r"sparse\w*gemm|spgemm", re.IGNORECASE)
"""Names of cuSPARSELt's kernels; a row has all names, so a wrong pattern can be seen."""


def build(name: str, device: torch.device) -> torch.nn.Module:
    with device:  # where it is used: a billion random numbers take a CPU too long
        torch.manual_seed(0)
        return MODELS[name].build()


@dataclass(frozen=True)
class Case:
    """A step: the model, the weights that become sparse, micro-batches, and whether it is compiled."""

    model: str
    targets: str
    micro: int
    compiled: bool

    def __str__(self) -> str:
        return f"{self.model}, {self.targets}, {self.micro} x, {'compiled' if self.compiled else 'eager'}"


LARGE = "four layers of Llama 8B"
CASES = [Case(LARGE, "all-linear", 8, True), Case(LARGE, "all-linear", 1, False), Case(LARGE, "mlp", 8, True)]
CASES += [Case(LARGE, "mlp", 1, False), Case(LARGE, "all-linear", 1, True), Case(LARGE, "all-linear", 8, False)]
CASES += [Case(LARGE, "mlp", 1, True), Case(LARGE, "mlp", 8, False)]
CASES += [Case(model, "all-linear", 8, True) for model in ("Llama 1B", "GPT-2 774M")]


class Steps(Section):
    """Random tokens and weights, fp32 masters under autocast to bf16, gradients clipped, fused AdamW.

    All ways are alive at once: 55 GB of weights, gradients and moments of the largest model.
    """

    name, group = "training step", "training"
    note = "Micro-batches of 8192 tokens, no mask refresh. Kernels: how often one starts in a step, and its us in all."

    def entries(self) -> list[Case]:
        return CASES

    def problems(self, entry: Case) -> list[GemmProblem]:
        tokens = prod(BATCHES[MODELS[entry.model].kind])
        layers = (mlp if entry.targets == "mlp" else linear_layers)(entry.model, tokens)
        return [problem for layer in layers for problem in layer.problems().values()]

    def goals(self, entry: Case) -> dict[str, float]:
        if entry == CASES[0]:
            return {"t-sr-ste": 1.20, "s-ste": 1.10}
        return {"t-sr-ste": 1.05, "s-ste": 1.04} if entry in CASES[1:4] else {}

    def measure(self, run: Run, entry: Case) -> Row:
        torch._dynamo.reset()  # it counts how often one piece of code was compiled, and stops at eight
        steps: dict[str, Call] = {}

        def make(way: str) -> list[Call]:
            model, batch = build(entry.model, run.machine.device), BATCHES[MODELS[entry.model].kind]
            step = training_step(model, batch, way, entry.compiled, entry.micro, target_modules=entry.targets)
            for _ in range(2):  # the first ones compile, choose masks and make the optimizer's state
                step()
            steps[way] = step
            return [step] * STEPS

        row = run.compare({way: partial(make, way) for way in WAYS}, run.machine.eager, ROUNDS)
        kernels = {way: partial(run.machine.kernels, step) for way, step in steps.items()}
        failed: dict[str, Row] = {}
        for way, found in run.made(kernels, str(entry), failed).items():
            sparse = sum(count for name, (count, _) in found.items() if SPARSE_GEMM.search(name))
            row["facts"] |= {f"{way}: sparse GEMMs": sparse, f"{way}: kernels": found}
            row["facts"][f"{way}: GPU busy, ms"] = sum(us for _, us in found.values()) / 1e3
        row["facts"] |= {f"{way}: kernels": error for way, error in failed.items()}
        return row


class OneLayer(Section):
    name, group = "one layer", "layer"
    note = "Forward and backward under autocast to bf16. The weight is pruned in each, as after an optimizer step."

    def entries(self) -> list[Layer]:
        return mlp("Llama 8B", prod(BATCHES["Llama"]))

    def problems(self, entry: Layer) -> list[GemmProblem]:
        return list(entry.problems().values())

    def goals(self, entry: Layer) -> dict[str, float]:
        return {"t-sr-ste": 1.25, "s-ste": 1.15}

    def measure(self, run: Run, entry: Layer) -> Row:
        ways = layer(entry.tokens, entry.out, entry.inputs, WAYS[1:], "auto", run.machine.device)
        return run.compare(
            {way: partial(lambda call: [call] * 10, call) for way, call in ways.items()}, run.machine.eager
        )


MEMORY = {
    "dense": ("dense", {}),
    "LoRA": ("lora", {}),
    "fixed-mask": ("fixed-mask", {"target_modules": "all-linear"}),
    "fixed-mask, packed": ("fixed-mask", {"target_modules": "all-linear", "master": "packed"}),
}
"""A way's method and settings."""


class Memory(Section):
    name, group = "training memory", "memory"
    note = "The most that torch had allocated in the second step of 4 x 2048 tokens; each way alone. LoRA: a bf16 base."

    def entries(self) -> list[str]:
        return ["Llama 1B"]

    def measure(self, run: Run, entry: str) -> Row:
        times: dict[str, Row] = {}
        facts: Row = {}

        def make(method: str, settings: dict[str, str]) -> tuple[float, float]:
            step = training_step(build(entry, run.machine.device), BATCHES["Llama"], method, **settings)
            step()
            return run.machine.peak(step), run.machine.eager([step] * STEPS)()

        for way, settings in MEMORY.items():
            for peak, seconds in run.made({way: partial(make, *settings)}, entry, times).values():
                times[way], facts[f"{way}: peak GB"] = spread([seconds]), peak / 1e9
            run.machine.forget()
        return {"times": times, "facts": facts}
