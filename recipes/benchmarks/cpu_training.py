"""Training steps on a CPU, with all that the controller does, beside those of a dense model."""

import time
from dataclasses import dataclass

import torch
from benchmark_cpu import QUICKSTART, build, training_step
from benchmarks.run import Row, Run, Section
from benchmarks.timing import middle
from transformers import PreTrainedModel

from . import cpu_models
from .cpu_models import SMOLLM2, smollm2

METHODS = ("dense", "s-ste", "t-sr-ste")
SMALL = "small Llama"
BATCHES = {SMALL: (8, 256), SMOLLM2: (4, 256), "tiny Llama": (2, 16)}
"""Sequences and tokens of each."""
SLOWER = {SMALL: 1.10, SMOLLM2: 1.03}
"""How many times as long as a dense step one may take."""


@dataclass(frozen=True)
class Task:
    model: str
    threads: int

    def __str__(self) -> str:
        sequences, length = BATCHES[self.model]
        return f"{self.model}, {sequences} x {length} tokens, {self.threads} thread{'s' * (self.threads > 1)}"


class Training(Section):
    name = "training"
    note = (
        "Microseconds of a training step in fp32, MLPs sparse; the models take turns step by step, and a ratio is that "
        f"of one turn. The small Llama has {QUICKSTART.num_hidden_layers} layers of {QUICKSTART.hidden_size} and "
        f"{QUICKSTART.intermediate_size}; weights of {SMOLLM2} are the published ones."
    )

    def __init__(self, quick: bool = False):
        self.models = ["tiny Llama"] if quick else [SMALL, SMOLLM2]
        self.seconds, self.least, self.most = (0, 2, 2) if quick else (240, 5, 60)
        if not quick:
            smollm2()

    def entries(self) -> list[Task]:
        return [Task(model, threads) for model in self.models for threads in (2, 1)]

    def goals(self, entry: Task) -> dict[str, float]:
        return {method: 1 / SLOWER[entry.model] for method in METHODS[1:] if entry.model in SLOWER}

    def measure(self, run: Run, entry: Task) -> Row:
        before = torch.get_num_threads()
        torch.set_num_threads(entry.threads)
        try:
            steps = {method: training_step(model_of(entry.model), BATCHES[entry.model], method) for method in METHODS}
            turns: list[dict[str, float]] = []
            start = time.perf_counter()
            for turn in range(-1, self.most):  # the first is a warm-up
                if turn >= self.least and time.perf_counter() - start > min(self.seconds, run.left()):
                    break
                found = {}
                for method, step in steps.items():
                    began = time.perf_counter(), time.process_time()
                    step()
                    found[method] = (time.perf_counter() - began[0]) * 1e6
                    found[f"{method}, CPU time"] = (time.process_time() - began[1]) * 1e6
                turns += [found] * (turn >= 0)
        finally:
            torch.set_num_threads(before)
        times: dict[str, Row] = {}
        facts: Row = {"turns": len(turns)}
        for method in METHODS:
            low, us, high = middle(turn[method] for turn in turns)
            times[method] = {"us": us, "p10_us": low, "p90_us": high}
            for suffix in ("", ", CPU time") if entry.threads == 1 else ("",):  # of several, some only wait
                own, dense = f"{method}{suffix}", f"dense{suffix}"
                least = min(turn[own] for turn in turns) / min(turn[dense] for turn in turns)
                facts[f"{own} over dense"] = middle(turn[own] / turn[dense] for turn in turns)
                facts[f"{own} over dense, least"] = float(f"{least:.4g}")
        return {"times": times, "facts": facts}


def model_of(name: str) -> PreTrainedModel:
    return build(QUICKSTART) if name == SMALL else cpu_models.build(name)
