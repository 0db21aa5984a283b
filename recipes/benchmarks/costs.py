"""What 2:4 simulation costs on a CPU, as ratios of things that took turns.

    python recipes/benchmarks/costs.py training     # a step of a patched model over a dense one's, per method
    python recipes/benchmarks/costs.py inference    # generating and evaluating, over the same model's export
    python recipes/benchmarks/costs.py oneshot      # oneshot's cost per layer, over that of a model of 4 layers

A training step is forward, backward, optimizer, and everything the controller does around it. What is compared takes
turns within each round, so that a slow moment of the machine hits all of it; a ratio is taken within its round. These
runs have no sparse GEMMs, so they say what pruning costs; `sparse_training.py` times sparse GEMMs on a CPU.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

# ruff: noqa: E402 (imports come after the path that they need)
ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:1] = [str(ROOT), str(ROOT / "kernels")]

import torch
import transformers
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from hf_sparse24 import Sparse24Config, __version__, export_model, oneshot, patch_model
from hf_sparse24.methods import METHODS
from hf_sparse24.progress import Progress, count, duration
from recipes.benchmarks.builds import SMALL, build, random_ids, training_step
from recipes.benchmarks.timing import turns
from recipes.stdlib_text import replace_file

TRAINING = {"gpt2-124m": (GPT2Config(), (1, 1024)), "llama-quickstart": (LlamaConfig(**SMALL), (8, 256))}
GENERATING = LlamaConfig(
    vocab_size=8192, hidden_size=768, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=12
)
LENGTH = {"min_new_tokens": 64, "max_new_tokens": 64}
DEPTHS = (4, 8, 16, 24, 32)
RESULTS = ROOT / "recipes/results"


def measure_training(rounds: int) -> list[dict]:
    rows = []
    for name, (config, batch) in TRAINING.items():
        runs = {method: training_step(build(config), batch, method) for method in ("dense", *sorted(METHODS))}
        times = take_turns(runs, rounds)
        columns = {"model": name, "tokens": batch[0] * batch[1]}
        rows += [columns | {"method": method} | summary(times[method], times["dense"]) for method in runs]
    return rows


@torch.no_grad()
def measure_inference(rounds: int) -> list[dict]:
    prompt, text = random_ids(GENERATING, 1, 16), random_ids(GENERATING, 4, 128)
    rows = []
    for method in sorted(METHODS):
        model = build(GENERATING).eval()
        patch_model(model, Sparse24Config(method=method))
        with tempfile.TemporaryDirectory() as directory:
            export_model(model, directory)
            export = AutoModelForCausalLM.from_pretrained(directory).eval()
        tasks = {
            "generate": lambda model: model.generate(prompt, do_sample=False, pad_token_id=0, **LENGTH),
            "evaluate": lambda model: model(text, labels=text).loss,
        }
        for task, run in tasks.items():
            assert torch.equal(run(model), run(export)), (method, task)
            times = take_turns({"export": lambda: run(export), "patched": lambda: run(model)}, rounds)  # noqa: B023
            rows.append({"task": task, "method": method} | summary(times["patched"], times["export"]))
    return rows


def measure_oneshot(rounds: int) -> list[dict]:
    data = [random_ids(LlamaConfig(**SMALL), 2, 128) for _ in range(4)]
    rows = []
    for criterion in ("wanda", "sparsegpt"):

        def prune(depth: int, criterion: str = criterion) -> None:
            config = LlamaConfig(**SMALL | {"num_hidden_layers": depth})
            sparse = Sparse24Config(method="fixed-mask", target_modules="all-linear")
            oneshot(build(config), data, sparse, criterion=criterion, reconstruct=None)

        times = take_turns({depth: lambda depth=depth: prune(depth) for depth in DEPTHS}, rounds)
        per_layer = {depth: [seconds / depth for seconds in times[depth]] for depth in DEPTHS}
        columns = {"criterion": criterion}
        rows += [columns | {"layers": depth} | summary(per_layer[depth], per_layer[4]) for depth in DEPTHS]
    return rows


def take_turns(runs: dict, rounds: int) -> dict:
    """Seconds of each run in each round, after one that warms up."""
    seconds = {name: [] for name in runs}
    with Progress("timing", (rounds + 1) * len(runs), "run") as progress:
        transformers.utils.logging.disable_progress_bar()  # of what is timed
        for turn in turns(rounds, rounds):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                if turn >= 0:
                    seconds[name].append(time.perf_counter() - start)
                progress.update(note=str(name))
    return seconds


def summary(times: list[float], baseline: list[float]) -> dict:
    ratios = [own / other for own, other in zip(times, baseline)]
    return {
        "seconds": statistics.median(times),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }


MEASURES = {"training": measure_training, "inference": measure_inference, "oneshot": measure_oneshot}
FILES = {"training": "cpu_step_time.json", "inference": "cpu_inference.json", "oneshot": "cpu_oneshot.json"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=MEASURES, nargs="?", default="training")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="default: recipes/results/cpu_*.json")
    arguments = parser.parse_args()
    start = time.perf_counter()
    rows = MEASURES[arguments.what](arguments.rounds)
    for row in rows:
        print(*(f"{value:.4g}" if isinstance(value, float) else value for value in row.values()), sep="\t")
    result = {
        "command": f"python recipes/benchmarks/costs.py {arguments.what} --rounds {arguments.rounds}",
        "hf_sparse24": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "rounds": arguments.rounds,
        "rows": rows,
    }
    output = arguments.output or RESULTS / FILES[arguments.what]
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_file(output, json.dumps(result, indent=2) + "\n")
    print(f"{count(len(rows), 'row')} in {duration(time.perf_counter() - start)}: {output}")


if __name__ == "__main__":
    main()
