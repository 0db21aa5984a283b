"""Training on a CPU in fp32: GEMMs, layers and steps by sparse GEMMs, and what pruning alone costs.

A process for each set of instructions and number of threads holds the ways of a case, which take turns. MKL, oneDNN,
OpenBLAS, torch and our kernels are limited alike. Packing the sparse operand of a GEMM is in its time, oneDNN's and
OpenBLAS's forms of their operands are not; all that a step does is in a step's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import sparse24_kernels as kernels
import torch
import transformers
from sparse24_kernels.cpu.library import loaded
from sparse24_kernels.gemm import cpu_kernels
from sparse24_kernels.gemm.cpu_kernels import compress as pack
from torch import nn
from torch.nn.functional import linear

from hf_sparse24 import Sparse24Config, patch_model
from hf_sparse24.methods import METHODS
from hf_sparse24.progress import count
from hf_sparse24.weights.sparse_weight import sparse_weights

from .builds import build, training_step
from .sections import Row, Run, Section
from .timing import Call, Cycle, clocked, over, spread, take_turns
from .variants import Loaded, Variant, serve

AVX2 = {"SPARSE24_CPU": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
AVX2 |= {"ATEN_CPU_CAPABILITY": "avx2", "OPENBLAS_CORETYPE": "Haswell"}
INSTRUCTIONS: dict[str, dict[str, str]] = {"best": {}, "avx2": AVX2}
"""Environment of the process that is limited to them."""

SIZES = ((512, 3072, 768), (512, 768, 3072), (1024, 768, 768), (1024, 1024, 1024), (1024, 4096, 1024))
SIZES += ((1024, 1024, 4096), (2048, 2048, 2048), (32, 96, 64))
"""Tokens, out and in of GEMMs; the last one is for --quick."""

SPARSE = ("t-sr-ste", "s-ste", "fixed-mask")
DENSE_GEMMS = ("dense", "oneDNN", "OpenBLAS")

Ways = dict[str, Call]


def gemm(tokens: int, out: int, inputs: int, name: str) -> Ways:
    """Ways to compute `left @ right.T`, of which the first is sparse in output, and in grad_weight."""
    x = torch.randn(tokens, inputs)
    if name == "output":
        left, right = kernels.nm_prune(torch.randn(out, inputs)), x
        ways: Ways = {"dense": lambda: linear(x, left), "sparse": lambda: cpu_kernels.linear(x, pack(left), None)}
    else:
        left, right = kernels.nm_prune(torch.randn(tokens, out), dim=0).t(), x.t()
        ways = {"dense": lambda: left @ x, "sparse": lambda: cpu_kernels.mm(pack(left), x)}
    opaque = [matrix.contiguous().to_mkldnn() for matrix in (right, left)]
    arrays = right.numpy(), left.numpy().T
    return ways | {"oneDNN": lambda: linear(*opaque), "OpenBLAS": lambda: arrays[0] @ arrays[1]}


def layer(
    tokens: int, out: int, inputs: int, methods: tuple[str, ...] = SPARSE, backend: str = "cpu", device: Any = "cpu"
) -> Ways:
    """Forward and backward; weights are pruned in each, as after an optimizer step. On a GPU under autocast to bf16."""
    device, on_gpu = torch.device(device), torch.device(device).type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    x = torch.randn(tokens, inputs, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn(tokens, out, device=device, dtype=dtype)

    def step(model: nn.Module) -> None:
        for weight in sparse_weights(model).values():
            weight.clear_encodings()
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            y = model(x)
        y.backward(grad)
        model.zero_grad()
        x.grad = None

    ways: Ways = {}
    for method in ("dense", *methods):
        model = nn.Sequential(nn.Linear(inputs, out, bias=False, device=device))
        if method != "dense":
            patch_model(model, Sparse24Config(method=method, target_modules=["0"], backend=backend))
        ways[method] = partial(step, model)
    return ways


def steps(model: str, batch: tuple[int, int], ways: dict[str, dict[str, Any]]) -> Ways:
    """Steps of a model, by the settings of each way."""
    return {way: training_step(build(model), batch, **settings) for way, settings in ways.items()}


def by(backend: str, *methods: str) -> dict[str, dict[str, Any]]:
    label = "{}, dense math" if backend == "dense" else "{}"
    options = {"target_modules": "all-linear", "backend": backend}
    return {label.format(method): {"method": method} | options for method in methods}


DENSE = {"dense": {"method": "dense"}}
BF16 = {"dense, bf16": {"method": "dense", "bf16": True}}
STEPS = DENSE | by("auto", *SPARSE) | by("dense", "s-ste", "fixed-mask") | BF16
CASES: dict[str, dict[str, Callable[[], Ways]]] = {
    "gemms": {
        f"{size[0]} x {size[2]} x {size[1]}, {name}": partial(gemm, *size, name)
        for size, name in product(SIZES, ("output", "grad_weight"))
    },
    "layers": {"1024 -> 4096, 1024 tokens": partial(layer, 1024, 4096, 1024)},
    "steps": {
        "a step of a Llama of 4 layers, d = 1024": partial(steps, "Llama, d = 1024", (2, 512), STEPS),
        "a step of GPT-2 124M": partial(steps, "GPT-2 124M", (1, 1024), DENSE | by("auto", "t-sr-ste") | BF16),
        "a step of the tiny Llama": partial(steps, "tiny Llama", (2, 32), STEPS),
    },
}
METHODS_OF_STEPS = DENSE | {method: {"method": method} for method in sorted(METHODS)}
PRUNING: dict[str, dict[str, Callable[[], Ways]]] = {
    "pruning": {
        "gpt2-124m": partial(steps, "GPT-2 124M", (1, 1024), METHODS_OF_STEPS),
        "llama-quickstart": partial(steps, "small Llama", (8, 256), METHODS_OF_STEPS),
        "the tiny Llama": partial(steps, "tiny Llama", (2, 32), METHODS_OF_STEPS),
    }
}


def load() -> Loaded:
    """The answers of a process: the ways of a case, and the seconds of a call of one."""
    transformers.utils.logging.disable_progress_bar()
    makers = {case: make for cases in (CASES | PRUNING).values() for case, make in cases.items()}
    held: dict[str, Ways] = {}

    def respond(case: str, threads: int, way: str = "") -> dict[str, Any]:
        torch.set_num_threads(threads)
        if case not in held:
            held.clear()
            held[case] = makers[case]()
        ways = held[case]
        if not way:
            return {"ways": list(ways)}
        return {"s": (Cycle([ways[way]] * 20, 0.2) if " x " in case else clocked(ways[way]))()}  # GEMMs several times

    return respond, {"path": getattr(loaded(), "path", "none")}


@dataclass(frozen=True)
class Entry:
    part: str
    case: str
    instructions: str
    threads: int

    def __str__(self) -> str:
        return f"{self.case}, {self.instructions}, {count(self.threads, 'thread')}"


class Training(Section):
    name = "training"
    note = "Packing and pruning are in the times. Ratios: of the dense time, within a turn."
    cases, instructions, threads = CASES, tuple(INSTRUCTIONS), (1, 2)
    tiny = ("32 x 64 x 96, output", "32 x 64 x 96, grad_weight", "a step of the tiny Llama")

    def __init__(self, quick: bool = False):
        self.quick = quick
        self.turns = (2, 2, 0.0) if quick else (4, 5, 60.0)
        self.alive: tuple[tuple[str, int, str], Variant] | None = None

    def entries(self) -> list[Entry]:
        cases = [(part, case) for part, found in self.cases.items() for case in found]
        shown = [(part, case) for part, case in cases if (case in self.tiny) == self.quick]
        return [Entry(*case, *limit) for limit in product(self.instructions, self.threads) for case in shown]

    def execute(self, run: Run) -> None:
        try:
            super().execute(run)
        finally:
            self.close()

    def close(self) -> None:
        if self.alive:
            self.alive[1].close()
        self.alive = None

    def variant(self, entry: Entry) -> Variant:
        """The process of an entry: a model has its own, because memory that others left makes steps slower."""
        key = entry.instructions, entry.threads, entry.case if entry.part == "steps" else ""
        if self.alive is None or self.alive[0] != key:
            self.close()
            limits = INSTRUCTIONS[entry.instructions] | {"OPENBLAS_NUM_THREADS": str(entry.threads)}
            self.alive = key, Variant(__name__, limits=limits)
        return self.alive[1]

    def measure(self, run: Run, entry: Entry) -> Row:
        variant = self.variant(entry)
        request = {"case": entry.case, "threads": entry.threads}

        def sample(way: str) -> float:
            return variant.ask(**request, way=way)["s"]

        # Without its instructions a step in bf16 takes minutes.
        ways = [way for way in variant.ask(**request)["ways"] if entry.instructions == "best" or "bf16" not in way]
        found = take_turns({way: partial(sample, way) for way in ways}, *self.turns)
        facts: Row = {"part": entry.part, "path": variant.loaded["path"], "turns": len(found["dense"])}
        facts |= {f"{way} over dense": over(found["dense"], found[way]) for way in ways[1:]}
        if entry.part == "gemms":
            best = min(DENSE_GEMMS, key=lambda way: median(found[way]))
            facts |= {"best": best, "sparse over best": over(found[best], found["sparse"])}
        return {"times": {way: spread(seconds) for way, seconds in found.items()}, "facts": facts}


class Pruning(Training):
    name = "pruning"
    note = "Steps of patched models by dense math: what pruning costs."
    cases, instructions, threads = PRUNING, ("best",), (2,)
    tiny = ("the tiny Llama",)


if __name__ == "__main__":
    serve(load)
