"""Training steps on a CPU, with all that the controller does, next to those of a dense model."""

import time
from dataclasses import dataclass

from hf_sparse24.progress import count

from .builds import SMALL, SMOLLM2, build, training_step
from .sections import Row, Run, Section
from .timing import middle, spread, threads, turns

METHODS = ("dense", "s-ste", "t-sr-ste")
BATCHES = {"small Llama": (8, 256), SMOLLM2: (4, 256), "tiny Llama": (2, 16)}
"""Sequences and tokens of each."""
SLOWER = {"small Llama": 1.10, SMOLLM2: 1.03}
"""How many times as long as a dense step one may take."""


@dataclass(frozen=True)
class Task:
    model: str
    threads: int

    def __str__(self) -> str:
        sequences, length = BATCHES[self.model]
        return f"{self.model}, {sequences} x {length} tokens, {count(self.threads, 'thread')}"


class Training(Section):
    name = "training"
    note = (
        "Microseconds of a training step in fp32, MLPs sparse; the models take turns step by step, and a ratio is that "
        f"of one turn. The small Llama has {SMALL['num_hidden_layers']} layers of {SMALL['hidden_size']} and "
        f"{SMALL['intermediate_size']}; weights of {SMOLLM2} are the published ones."
    )

    def __init__(self, quick: bool = False):
        self.models = ["tiny Llama"] if quick else ["small Llama", SMOLLM2]
        self.seconds, self.least, self.most = (0, 2, 2) if quick else (240, 5, 60)

    def entries(self) -> list[Task]:
        return [Task(model, threads) for model in self.models for threads in (2, 1)]

    def goals(self, entry: Task) -> dict[str, float]:
        return {method: 1 / SLOWER[entry.model] for method in METHODS[1:] if entry.model in SLOWER}

    def measure(self, run: Run, entry: Task) -> Row:
        rounds: list[dict[str, float]] = []
        with threads(entry.threads):
            steps = {method: training_step(build(entry.model), BATCHES[entry.model], method) for method in METHODS}
            for turn in turns(self.least, self.most, min(self.seconds, run.left())):
                found = {}
                for method, step in steps.items():
                    began = time.perf_counter(), time.process_time()
                    step()
                    found[method] = (time.perf_counter() - began[0]) * 1e6
                    found[f"{method}, CPU time"] = (time.process_time() - began[1]) * 1e6
                rounds += [found] * (turn >= 0)
        times: dict[str, Row] = {}
        facts: Row = {"turns": len(rounds)}
        for method in METHODS:
            times[method] = spread(turn[method] for turn in rounds)
            for suffix in ("", ", CPU time") if entry.threads == 1 else ("",):  # of several, some only wait
                own, dense = f"{method}{suffix}", f"dense{suffix}"
                least = min(turn[own] for turn in rounds) / min(turn[dense] for turn in rounds)
                facts[f"{own} over dense"] = middle(turn[own] / turn[dense] for turn in rounds)
                facts[f"{own} over dense, least"] = float(f"{least:.4g}")
        return {"times": times, "facts": facts}
