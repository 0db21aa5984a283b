"""Models on a CPU: `generate` of packed exports and of dense ones, and what a packed layer's call costs.

Each variant of a model is a separate process, which loads it and answers requests; variants are asked in turn, and
ratios are taken within a turn.
"""

import copy
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import sparse24_kernels as kernels
import torch
from torch import nn

from hf_sparse24.progress import count

from . import llama_cpp
from .builds import DTYPES, FORMATS, SMOLLM2, clock, export, random_ids
from .cpu_layers import NEVER_SLOWER
from .sections import Row, Run, Section
from .timing import Turns, middle, spread, threads, turns
from .variants import Loaded, Variant, serve

PROMPT, NEW, LONG_PROMPT = 32, 32, 512
COMPILED = {f"compiled {way}": way for way in FORMATS}
"""Ways whose steps are compiled, with a cache of fixed size, and the exports that they load."""
GOALS = {"Llama-1B": {"packed": 1.6, "packed int8": 2.5}, SMOLLM2: {"packed": 1.3}}
GOALS[SMOLLM2] |= {"compiled packed": 1.8, "compiled packed int8": 2.0}
"""Times as fast as the dense export in decoding, bf16 and one sequence; elsewhere never slower."""


def load(folder: str, way: str = "") -> Loaded:
    """What the process of an export does: seconds to the first token, and of each step after it."""
    import transformers

    import hf_sparse24  # noqa: F401 (reads packed models)

    times: list[float] = []

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    model.generation_config.eos_token_id = None  # always so many tokens
    compiled = transformers.CompileConfig(fullgraph=True)
    compiled._compile_all_devices = True  # on CPUs too

    def respond(prompt: int, new: int, batch: int, threads: int) -> dict[str, float]:
        torch.set_num_threads(threads)
        ids = random_ids(model.config, batch, prompt)
        settings = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "stopping_criteria": [clock(times)]}
        if way in COMPILED:  # of a cache of another size, the step would be compiled again
            cache = transformers.StaticCache(model.config, max_cache_len=prompt + NEW)
            settings |= {"past_key_values": cache, "compile_config": compiled}
        times[:] = [time.perf_counter()]
        model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        assert len(times) == new + 1
        return {"first": times[1] - times[0], "step": (times[-1] - times[1]) / max(1, new - 1)}

    return respond, {}


@dataclass(frozen=True)
class Task:
    model: str
    dtype: str
    threads: int
    batch: int

    def __str__(self) -> str:
        return f"{self.model} {self.dtype}, {count(self.batch, 'sequence')}, {count(self.threads, 'thread')}"


class Generation(Section):
    name = "generation"
    note = (
        f"Decoding: {NEW} new tokens after a prompt of {PROMPT}. First token: of a prompt of {LONG_PROMPT} tokens. "
        "Peak memory: of the process, with what Python imports, after loading, the long prompt and decoding. "
        "Compiled: the step of a token by torch.compile, with a cache of fixed size, bf16, one sequence, over the "
        "compiled dense export. "
        "llama.cpp has the dense model, by the wheel of xllamacpp, whose instructions are named below."
    )

    def __init__(self, quick: bool = False, with_llama_cpp: bool = False, folder: Path = Path("runs/benchmark_cpu")):
        if with_llama_cpp:
            llama_cpp.check_installed()
        self.models = ["tiny Llama"] if quick else ["Llama-1B", SMOLLM2]
        self.sizes = (4, 4, 8) if quick else (PROMPT, NEW, LONG_PROMPT)
        self.seconds, self.least, self.most = (0, 2, 2) if quick else (15, 3, 9)
        self.with_llama_cpp, self.folder = with_llama_cpp, folder
        self.alive: tuple[object, dict[str, Variant]] = None, {}

    def entries(self) -> list[Task]:
        tasks = [Task(m, d, t, b) for m in self.models for d in DTYPES for t in (2, 1) for b in (1, 4)]
        return [task for task in tasks if task.model != "Llama-1B" or task.threads == 2]  # one thread takes too long

    def goals(self, entry: Task) -> dict[str, float]:
        special = GOALS.get(entry.model, {}) if (entry.dtype, entry.batch) == ("bf16", 1) else {}
        return NEVER_SLOWER | special

    def execute(self, run: Run) -> None:
        try:
            super().execute(run)
        finally:
            self.close()

    def close(self) -> None:
        for variant in self.alive[1].values():
            variant.close()
        self.alive = None, {}

    def variants(self, run: Run, entry: Task, times: dict[str, Row]) -> dict[str, Variant]:
        """The processes of a model; others are ended first. The error of one that cannot start goes into `times`."""
        key = (entry.model, entry.dtype, entry.threads)
        if self.alive[0] != key:
            self.close()
            found: dict[str, Variant] = {}
            for way, start in self.starts(entry):
                try:
                    found[way] = start()
                except Exception as error:  # one that fails must not stop the others
                    times[way] = {"error": run.note(error, f"{entry}: {way}")}
            self.alive = key, found
        return self.alive[1]

    def starts(self, entry: Task) -> Iterator[tuple[str, Callable[[], Variant]]]:
        def of_export(way: str) -> Variant:
            folder = export(entry.model, entry.dtype, COMPILED.get(way, way), self.folder)
            return Variant(__name__, str(folder), way)

        def of_gguf(kind: str) -> Variant:
            file = llama_cpp.export(entry.model, kind, self.folder)
            return Variant(llama_cpp.__name__, str(file), str(entry.threads))

        yield from ((way, partial(of_export, way)) for way in (*FORMATS, *(COMPILED if entry.dtype == "bf16" else ())))
        if self.with_llama_cpp and entry.dtype == "bf16":
            yield from ((f"llama.cpp {kind}", partial(of_gguf, kind)) for kind in llama_cpp.KINDS)

    def measure(self, run: Run, entry: Task) -> Row:
        times: dict[str, Row] = {}
        prompt, new, long_prompt = self.sizes
        variants = self.variants(run, entry, times)
        if entry.batch > 1:  # the others are asked for one sequence alone
            variants = {way: variant for way, variant in variants.items() if way in FORMATS}
        decode = {"prompt": prompt, "new": new, "threads": entry.threads, "batch": entry.batch}
        first = decode | {"prompt": long_prompt, "new": 1}
        rounds: list[dict[str, dict[str, float]]] = []
        for turn in turns(self.least, self.most, self.seconds):
            found = {}
            for way, variant in variants.items():
                asked = variant.ask(**decode | {"new": 4 if turn < 0 else new})
                if entry.batch == 1 and 0 <= turn < self.least:
                    asked |= {"first": variant.ask(**first)["first"]}
                found[way] = asked
            rounds += [found] * (turn >= 0)
        facts: Row = {"turns": len(rounds)}
        for way, variant in variants.items():
            times[way] = spread(turn[way]["step"] * 1e6 for turn in rounds)
            facts[f"{way}, tokens per s"] = entry.batch * 1e6 / times[way]["us"]
            if entry.batch == 1:
                facts[f"{way}, first token ms"] = middle(turn[way]["first"] * 1e3 for turn in rounds[: self.least])
                facts[f"{way}, peak GB"] = variant.ask(**decode | {"new": 1})["peak GB"]
                facts[f"{way}, loaded in s"] = variant.loaded["load s"]
                facts |= {f"{way}, system": variant.loaded["system"]} if "system" in variant.loaded else {}
            dense = "compiled dense" if way in COMPILED else "dense"
            if way != dense and dense in variants:
                facts[f"{way} over dense"] = middle(turn[dense]["step"] / turn[way]["step"] for turn in rounds)
        return {"times": {way: times[way] for way in (*FORMATS, *times) if way in times}, "facts": facts}


class Calls(Section):
    """What Python takes per call of a layer of 64 x 64, whose weight is in a cache: 2 us of work at most."""

    name = "calls"
    note = "Microseconds of a call of a tiny layer, or of an MLP of three, one thread, one token, bf16."

    def __init__(self, quick: bool = False):
        self.turns, self.calls = (3, 5) if quick else (21, 500)

    def entries(self) -> list[str]:
        return ["a layer", "an MLP", "an MLP, torch.compile"]

    def measure(self, run: Run, entry: str) -> Row:
        from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

        x = torch.randn(1, 64, dtype=torch.bfloat16)
        mlp = LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=64)).bfloat16().eval()
        packed = packed_copy(mlp)
        ways: dict[str, Callable[[Any], object]] = {"dense": mlp, "packed": packed}
        if entry == "a layer":
            weight = kernels.pack_nm(packed.up_proj.weight)
            ways = {"dense": mlp.up_proj, "packed": packed.up_proj}
            ways["kernels.packed_linear"] = lambda x: kernels.packed_linear(x, weight)
        if "compile" in entry:
            ways = {way: torch.compile(module, fullgraph=True) for way, module in ways.items()}
        with threads(1), torch.inference_mode():
            found = {way: Turns([partial(call, x)] * self.calls, 1) for way, call in ways.items()}
            rounds = [{way: samples.sample() * 1e6 for way, samples in found.items()} for _ in range(self.turns)]
        times = {way: spread(turn[way] for turn in rounds) for way in ways}
        return {"times": times, "facts": {"turns": self.turns}}


def packed_copy(module: nn.Module) -> Any:
    from hf_sparse24 import Sparse24Config, pack_model, patch_model

    parent = nn.ModuleList([copy.deepcopy(module)])
    patch_model(parent, Sparse24Config(method="ste", target_modules="all-linear"))
    pack_model(parent)
    return parent[0]


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    serve(partial(load, *sys.argv[1:]))
