"""Packed linear layers on a CPU, torch's `F.linear`, and a dense kernel of ours (dense.cpp).

Every way has its own copies of the weights, a gigabyte and more, and goes round them, so that no call finds its weight
in a cache. Ways take turns, and ratios are taken within a turn.
"""

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import sparse24_kernels as kernels
import torch
from sparse24_kernels import Packed
from sparse24_kernels.gemm import linear_problem, plan_packed
from sparse24_kernels.matmul import packed_layer
from torch import Tensor
from torch.nn.functional import linear

from hf_sparse24.progress import count

from .builds import DTYPES
from .machines import Cpu, compiler
from .sections import Row, Run, Section
from .shapes import MODELS
from .timing import Cycle, over, spread, take_turns

SHAPES = [MODELS["Llama 8B"].attention()["query"], MODELS["Llama 1B"].mlp()["MLP down"]]
SHAPES += [MODELS["SmolLM2-135M"].mlp()["MLP down"], MODELS["Llama 8B"].mlp()["MLP up"]]
"""Out and in."""

TOKENS, THREADS = (1, 4, 16, 64, 512), (1, 2)
DENSE_TOKENS = 4
"""Most tokens that our dense kernel is timed with: it reads weights well, and is no GEMM of many tokens."""

PACKED = ("packed", "packed 16:32", "packed int8", "packed 16:32 int8")
AT_ONE = {"packed": 1.65, "packed 16:32": 1.5, "packed int8": 3.0, "packed 16:32 int8": 2.9}
GOALS = {("bf16", 1): AT_ONE}
NEVER_SLOWER = dict.fromkeys(PACKED, 0.97)
"""Goals by dtype and tokens, and those of the rest: times as fast as the better dense way."""


@cache
def native() -> tuple[ctypes.CDLL, ctypes.c_void_p]:
    """dense.cpp, compiled for this CPU, and the function of torch that runs it on torch's threads.

    Raises:
        RuntimeError: no compiler, or a CPU without AVX512_BF16.
    """
    if shutil.which(compiler()) is None:
        raise RuntimeError(f"dense.cpp was not compiled: there is no {compiler()}, set CXX")
    with tempfile.TemporaryDirectory() as folder:
        command = [compiler(), "-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-o", f"{folder}/dense.so"]
        done = subprocess.run([*command, str(Path(__file__).with_name("dense.cpp"))], capture_output=True, text=True)
        if done.returncode:
            reason = re.search(r"error: (.*)", done.stderr)
            raise RuntimeError(f"dense.cpp was not compiled: {reason[1] if reason else done.stderr}")
        library = ctypes.CDLL(f"{folder}/dense.so")
    torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    return library, ctypes.cast(torch_cpu.torch_parallel_for, ctypes.c_void_p)


def own_dense(x: Tensor, at_a_time: int, weight: Tensor) -> Tensor:
    """`[T, K]` times `[R, K]`, by our dense kernel, 1 or 4 rows at a time: bf16 or fp32; R a multiple of 4, K of 64."""
    library, run = native()
    (tokens, k), rows = x.shape, len(weight)
    assert x.is_contiguous() and weight.is_contiguous() and rows % 4 == 0 and k % 64 == 0 and x.dtype == weight.dtype
    y = x.new_empty(tokens, rows)
    function = library.linear_bf16 if x.dtype == torch.bfloat16 else library.linear_fp32
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, weight, y))
    function(*pointers, *map(ctypes.c_int64, (tokens, rows, k, at_a_time)), run)
    return y


@dataclass(frozen=True)
class Layer:
    out: int
    inputs: int
    dtype: str
    threads: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.out}x{self.inputs} {self.dtype}, {count(self.tokens, 'token')}, {count(self.threads, 'thread')}"


Weight = Tensor | Packed


def copies(weight: Weight, least: float) -> list[Weight]:
    """As many copies of a weight as have `least` bytes, at least 2."""
    number = max(2, -(-int(least) // size(weight)))
    if isinstance(weight, Tensor):
        return list(weight.expand(number, *weight.shape).clone())
    parts = {name: part for name, part in weight._asdict().items() if isinstance(part, Tensor)}
    many = {name: part.expand(number, *part.shape).clone() for name, part in parts.items()}
    return [weight._replace(**{name: part[i] for name, part in many.items()}) for i in range(number)]


def size(weight: Weight) -> int:
    """Bytes of a weight."""
    return (
        weight.nbytes if isinstance(weight, Tensor) else sum(part.nbytes for part in weight if isinstance(part, Tensor))
    )


def check(y: Tensor, x: Tensor, weight: Weight) -> None:
    """Assert that a result is right. With int8 values x may be rounded to 8 bits, too."""
    truth = linear(x.float(), (weight if isinstance(weight, Tensor) else kernels.unpack_nm(weight)).float())
    error = ((y.float() - truth).norm() / truth.norm()).item()
    rounded = isinstance(weight, Packed) and weight.scales is not None
    allowed = 0.02 if rounded else {torch.bfloat16: 0.01, torch.float32: 1e-5}[y.dtype]
    assert error <= allowed, f"relative error {error:.2g}, at most {allowed:.2g} is allowed"


def fastest(ways: list[Cycle]) -> Cycle:
    return min(ways, key=lambda sample: min(sample() for _ in range(3)))


class Layers(Section):
    """Quick: tiny, to see whether it runs; what it says of speed is nothing."""

    name = "layers"
    note = "Microseconds per call, weights out of cache: 10 % quantile, median and 90 % quantile of the turns."

    def __init__(self, quick: bool = False):
        self.shapes, self.bytes = (((64, 128),), 1e5) if quick else (SHAPES, 1.1e9)
        self.seconds, self.turns = (1e-4, (3, 3, 0.0)) if quick else (0.04, (5, 15, 3.5))
        self.shared: tuple[object, dict[str, list[Weight]]] = None, {}

    def entries(self) -> list[Layer]:
        return [Layer(*s, d, t, n) for s in self.shapes for d in DTYPES for t in THREADS for n in TOKENS]

    def goals(self, entry: Layer) -> dict[str, float]:
        return NEVER_SLOWER | GOALS.get((entry.dtype, entry.tokens), {})

    def weights(self, entry: Layer) -> dict[str, list[Weight]]:
        """Copies of a 2:4 weight in each form; kept until another weight is asked for."""
        key = (entry.out, entry.inputs, entry.dtype)
        if self.shared[0] != key:
            self.shared = None, {}  # gives the memory back first
            torch.manual_seed(0)
            dense = kernels.nm_prune(torch.randn(key[:2]).div_(entry.inputs**0.5).to(DTYPES[entry.dtype]))
            packed, wide = kernels.pack_nm(dense), kernels.pack_nm(dense, 16, 32)
            forms = {"dense": dense, "packed": packed, "packed int8": kernels.quantize_packed(packed)}
            forms |= {"packed 16:32": wide, "packed 16:32 int8": kernels.quantize_packed(wide)}
            self.shared = key, {form: copies(weight, self.bytes) for form, weight in forms.items()}
        return self.shared[1]

    def ways(self, entry: Layer) -> dict[str, Callable[[], Cycle]]:
        weights, x = self.weights(entry), torch.randn(entry.tokens, entry.inputs).to(DTYPES[entry.dtype])

        def round_copies(form: str, function: Callable[[Any], Tensor]) -> Cycle:
            check(function(weights[form][0]), x, weights[form][0])
            return Cycle([partial(function, weight) for weight in weights[form]], self.seconds)

        ways = {"torch": partial(round_copies, "dense", partial(linear, x))}
        if entry.tokens <= DENSE_TOKENS:
            ways["dense"] = lambda: fastest([round_copies("dense", partial(own_dense, x, rows)) for rows in (1, 4)])
        return ways | {form: partial(round_copies, form, partial(packed_layer, x)) for form in PACKED}

    def measure(self, run: Run, entry: Layer) -> Row:
        before = torch.get_num_threads()
        torch.set_num_threads(entry.threads)
        try:
            return self.compare(run, entry)
        finally:
            torch.set_num_threads(before)

    def compare(self, run: Run, entry: Layer) -> Row:
        times: dict[str, Row] = {}
        found = run.made(self.ways(entry), str(entry), times)
        seconds = take_turns(found, *self.turns)
        times |= {way: spread(samples) for way, samples in seconds.items()}
        best = min(("torch", "dense"), key=lambda way: times.get(way, {}).get("us", float("inf")))
        facts: Row = {"turns": len(seconds[best]), "best dense": best}
        for way in found.keys() & NEVER_SLOWER.keys():
            for name, base in (("best dense", best), ("torch", "torch")):
                facts[f"{way} over {name}"] = over(seconds[base], seconds[way])
        problem = linear_problem(entry.tokens, entry.out, entry.inputs, DTYPES[entry.dtype])
        facts["plan"] = plan_packed(problem, Cpu.device).reason
        return {"times": {best: times[best]} | times, "facts": dict(sorted(facts.items()))}
