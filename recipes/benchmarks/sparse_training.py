"""Training with sparse GEMMs on a CPU: GEMMs, layers, whole steps, and an encoder, against dense math in fp32.

    python recipes/benchmarks/sparse_training.py

Each set of instructions has a process, in which MKL, oneDNN, torch and our kernels are limited alike. What is compared
takes turns in each round; a speed-up is the dense time over the other, in its round. Packing the sparse operand of a
GEMM is in its time; everything that a step does is in that of a step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# ruff: noqa: E402 (imports come after the path that they need)
ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:1] = [str(ROOT), str(ROOT / "kernels")]

import sparse24_kernels as kernels
import torch
import transformers
from sparse24_kernels.cpu.library import loaded
from sparse24_kernels.gemm import cpu_kernels
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, LlamaConfig

from hf_sparse24 import Sparse24Config, __version__, pack_model, patch_model
from hf_sparse24.weights.sparse_weight import sparse_weights
from recipes.benchmarks.builds import build, random_ids, training_step
from recipes.benchmarks.costs import take_turns
from recipes.benchmarks.cpu_layers import Cpu
from recipes.benchmarks.variants import environment
from recipes.stdlib_text import replace_file

AVX2 = {
    "SPARSE24_CPU": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
}
INSTRUCTIONS: dict[str, dict[str, str]] = {"best": {}, "avx2": AVX2}
GEMMS = [
    (512, 3072, 768),
    (512, 768, 3072),
    (1024, 768, 768),
    (1024, 4096, 1024),
    (1024, 1024, 4096),
    (2048, 2048, 2048),
]
"""Tokens, out and in."""

LAYER = (1024, 4096, 1024)
LLAMA = LlamaConfig(
    vocab_size=8192,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=16,
)
GPT2 = GPT2Config()
MINILM = BertConfig(hidden_size=384, intermediate_size=1536, num_hidden_layers=6)
METHODS = ("t-sr-ste", "s-ste", "fixed-mask")
Runs = dict[str, Callable[[], Any]]


def gemms() -> dict[str, Runs]:
    found: dict[str, Runs] = {}
    for tokens, out, inputs in GEMMS:
        x, weight = torch.randn(tokens, inputs), kernels.nm_prune(torch.randn(out, inputs))
        grad = kernels.nm_prune(torch.randn(tokens, out), dim=0)

        def linear(x=x, weight=weight):
            return cpu_kernels.linear(x, cpu_kernels.compress(weight), None)

        def product(x=x, grad=grad):
            return cpu_kernels.mm(cpu_kernels.compress(grad.t()), x)

        dense = lambda x=x, weight=weight: nn.functional.linear(x, weight)  # noqa: E731
        found[f"{tokens} x {inputs} x {out}, output"] = {"dense": dense, "sparse": linear}
        found[f"{tokens} x {inputs} x {out}, grad_weight"] = {
            "dense": lambda x=x, grad=grad: grad.t() @ x,
            "sparse": product,
        }
    return found


def layers() -> dict[str, Runs]:
    tokens, out, inputs = LAYER
    x, grad = torch.randn(tokens, inputs, requires_grad=True), torch.randn(tokens, out)

    def step(model: nn.Module) -> None:
        for weight in sparse_weights(model).values():
            weight.clear_encodings()  # as an optimizer step does
        model(x).backward(grad)
        model.zero_grad()
        x.grad = None

    runs: Runs = {}
    for method in ("dense", *METHODS):
        model = nn.Sequential(nn.Linear(inputs, out, bias=False))
        if method != "dense":
            patch_model(model, Sparse24Config(method=method, target_modules=["0"], backend="cpu"))
        runs[method] = lambda model=model: step(model)
    return {f"{inputs} -> {out}, {tokens} tokens": runs}


def steps() -> dict[str, Runs]:
    runs: Runs = {"dense": training_step(build(LLAMA), (2, 512), "dense")}
    for method, backend in [*((method, "cpu") for method in METHODS), (METHODS[0], "dense")]:
        label = method if backend == "cpu" else f"{method}, dense math"
        options = {"target_modules": "all-linear", "backend": backend}
        runs[label] = training_step(build(LLAMA), (2, 512), method, **options)
    options = {"target_modules": "all-linear", "backend": "cpu"}
    ways = {"dense": {}, METHODS[0]: options}
    gpt2 = {way: training_step(build(GPT2), (1, 1024), way, **options) for way, options in ways.items()}
    return {"a step of a Llama of 8 layers, d = 1024": runs, "a step of GPT-2 124M": gpt2}


@torch.no_grad()
def encoder() -> dict[str, Runs]:
    dense, packed = BertModel(MINILM).eval(), BertModel(MINILM).eval()
    patch_model(packed, Sparse24Config(method="ste", target_modules="all-linear"))
    pack_model(packed)
    ids = random_ids(dense.config, 32, 128)
    return {"MiniLM, 32 sequences of 128": {"dense": lambda: dense(ids), "packed": lambda: packed(ids)}}


PARTS = {"gemms": gemms, "layers": layers, "steps": steps, "encoder": encoder}


def measure(part: str, rounds: int) -> list[dict[str, Any]]:
    """A row for each case and way: seconds, and the speed-up over dense."""
    rows = []
    for case, runs in PARTS[part]().items():
        with torch.set_grad_enabled(part in ("layers", "steps")):
            seconds = take_turns(runs, rounds)
        for way, times in seconds.items():
            speedups = sorted(dense / own for dense, own in zip(seconds["dense"], times))
            row = {"part": part, "case": case, "way": way, "seconds": statistics.median(times)}
            row |= {"speedup": statistics.median(speedups), "least": speedups[0], "most": speedups[-1]}
            rows.append(row)
            print(*row.values(), sep="\t", file=sys.stderr, flush=True)
    return rows


def curves(steps: int) -> dict[str, list[float]]:
    """The loss of each step on one batch, by sparse GEMMs and by dense math, from the same weights and random keys."""
    found = {}
    for backend in ("cpu", "dense"):
        options = {"target_modules": "all-linear", "backend": backend}
        step = training_step(build("small Llama"), (2, 256), METHODS[0], **options)
        found[backend] = [step() for _ in range(steps)]
    return found


RESULT = ROOT / "recipes/results/cpu_training.json"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="of the loss curves (default 100)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.parts != list(PARTS) and not options.child and options.output == RESULT:
        parser.error("--parts would replace the whole result: name a file with --output")
    if options.child:
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(options.threads[0])
        rows = [row for part in options.parts for row in measure(part, options.rounds)]
        print(json.dumps([{"path": loaded().path, "threads": options.threads[0], **row} for row in rows]))
        return
    rows = []
    for limits in INSTRUCTIONS.values():
        for threads in options.threads:
            for part in options.parts:
                command = [sys.executable, __file__, "--child", "1", "--threads", str(threads), "--parts", part]
                command += ["--rounds", str(options.rounds)]
                done = subprocess.run(
                    command, env=environment() | limits, stdout=subprocess.PIPE, text=True, check=True
                )
                rows += json.loads(done.stdout.splitlines()[-1])
    result = {
        "command": f"python recipes/benchmarks/sparse_training.py --rounds {options.rounds}",
        "hf_sparse24": __version__,
        "torch": torch.__version__,
        "cpu": Cpu().facts["cpu"],
        "load": round(os.getloadavg()[0], 1),
        "losses": curves(options.steps),
        "rows": rows,
    }
    replace_file(options.output, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
