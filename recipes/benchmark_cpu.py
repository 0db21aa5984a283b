"""What 2:4 simulation costs on a CPU: step time of a patched model over the dense one, per method.

    python recipes/benchmark_cpu.py [--rounds 5] [--output recipes/results/cpu_step_time.json]

A step is forward, backward, optimizer, and everything the controller does around it. Dense and patched models take
turns within each round, so that a slow moment of the machine hits all of them; a ratio is taken within its round.
There is no speed to gain on a CPU: this number says what developing and testing there costs.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers
from stdlib_text import replace_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel

from hf_sparse24 import (
    METHODS,
    Sparse24Config,
    Sparse24Controller,
    StepAdamW,
    __version__,
    patch_model,
    step_param_groups,
)

WORKLOADS = {
    "gpt2-124m": {"config": GPT2Config(), "batch": (1, 1024)},
    "llama-quickstart": {
        "config": LlamaConfig(
            vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4
        ),
        "batch": (8, 256),
    },
}


class Run:
    """A model in training; `step()` takes one optimizer step and returns its seconds."""

    def __init__(self, model: PreTrainedModel, batch: tuple[int, int], method: str):
        self.model = model
        self.controller = None
        if method != "dense":
            patch_model(model, Sparse24Config(method=method))
        if method == "step":  # switched after the warm-up: what it costs while it is sparse
            self.optimizer = StepAdamW(
                step_param_groups(model), lr=1e-4, total_steps=100_000, switch_after=1, switch_by=1
            )
        else:
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        if method != "dense":
            self.controller = Sparse24Controller(model, self.optimizer, total_steps=100_000, metrics_interval=10)
        self.ids = torch.randint(0, model.config.vocab_size, batch)

    def step(self) -> float:
        start = time.perf_counter()
        self.model(self.ids, labels=self.ids).loss.backward()
        if self.controller is not None:
            self.controller.before_step()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.controller is not None:
            self.controller.after_step()
        return time.perf_counter() - start


def measure(name: str, rounds: int) -> list[dict]:
    workload = WORKLOADS[name]
    runs = {}
    for method in ("dense", *sorted(METHODS)):
        torch.manual_seed(0)
        runs[method] = Run(AutoModelForCausalLM.from_config(workload["config"]).train(), workload["batch"], method)
        runs[method].step()  # warm up: allocations, and the flip rate of the first step
    seconds = {method: [] for method in runs}
    for _ in range(rounds):
        for method, run in runs.items():
            seconds[method].append(run.step())
    rows = []
    for method, times in seconds.items():
        ratios = [own / dense for own, dense in zip(times, seconds["dense"])]
        rows.append(
            {
                "model": name,
                "tokens": workload["batch"][0] * workload["batch"][1],
                "method": method,
                "seconds": statistics.median(times),
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
            }
        )
        print(
            "{model:18} {method:9} {seconds:7.3f} s  {ratio:.3f} [{ratio_min:.3f}, {ratio_max:.3f}]".format(**rows[-1])
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "cpu_step_time.json")
    arguments = parser.parse_args()
    print("model              method      median    over dense [min, max]")
    rows = [row for name in WORKLOADS for row in measure(name, arguments.rounds)]
    result = {
        "command": f"python recipes/benchmark_cpu.py --rounds {arguments.rounds}",
        "hf_sparse24": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "rounds": arguments.rounds,
        "rows": rows,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    replace_file(arguments.output, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
