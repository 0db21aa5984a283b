"""TileLang's 2:4 product (`T.gemm_sp`, wgmma.sp on Hopper) as a contestant: does it beat cuSPARSELt at real shapes?

One product, the forward one: x `[tokens, in]` times a 2:4 W `[out, in]`, bf16, no bias, as W times x with the result
stored as `[tokens, out]`. TileLang is no dependency of ours: where it (with nvcc) is not installed, or the device is no
Hopper, the report says so and nothing runs. Each layer is measured in a process of its own, because a kernel that hangs
or faults takes its process with it. There a handful of tilings is compiled; each is checked as cuSPARSELt's algorithms
are (`assert_three_way`), twice, with equal bits; those that pass are sampled in turn with the dense product and with
cuSPARSELt by the tuner's algorithm; the others leave their reason, and what has ended a process is not tried again. No
time includes packing: TileLang reads the values and indices of `pack_nm` as they are, cuSPARSELt what `compress` makes.

The fastest of the tilings counts. If it is `FASTER` times as fast as cuSPARSELt, a backend for it is worth building.
"""

import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import sparse24_kernels as kernels
import torch
from report import clean
from shapes import MLPS, Cell
from side_by_side import NOT_RUN, assert_three_way, judged, ratio, side_by_side
from timing import Cuda, describe
from torch import Tensor, nn
from trainer import MARK, in_process

CELLS = [Cell(layer, 8192) for layer in MLPS[:3]]
FASTER = 1.02
"""By how much the tuner wants an algorithm to win."""

SHARE, ENOUGH, SECONDS = 0.4, 20.0, 35.0
"""Of the time that tuning has left; seconds that a process needs to get anywhere; seconds that it gets at most."""


class Tiling(NamedTuple):
    """What a thread block computes: `[out, tokens]` of the product, `inputs` of the sum at a time.

    `inputs` is at least 128: TMA wants 16 bytes of a row, and a row of indices has two bits per weight kept. With 64,
    indices go through registers, and their latency is paid in every step.
    """

    out: int
    tokens: int
    inputs: int
    stages: int
    threads: int  # that multiply; 128 more load

    def __str__(self) -> str:
        return f"{self.out}x{self.tokens}x{self.inputs}, {self.stages} stages, {self.threads} threads"


TILINGS = (
    Tiling(128, 256, 128, 2, 256),
    Tiling(256, 128, 128, 3, 256),
    Tiling(128, 128, 128, 4, 256),
    Tiling(128, 128, 128, 4, 128),
)


def why_not(device: torch.device) -> str | None:
    if find_spec("tilelang") is None:
        return "tilelang is not installed"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "wgmma.sp needs compute capability 9.0"
    return None


def section(run) -> None:
    """Every layer in its process, as far as the time goes. Nothing that fails here is an error of the run."""
    cells = [cell for cell in CELLS if run.options.only in str(cell)]
    reason, rows = why_not(run.machine.device), {str(cell): {"error": NOT_RUN} for cell in cells}
    run.result["tilelang"] = {"why_not": reason, "wanted": FASTER, "rows": {} if reason else rows}
    end, tilings = time.monotonic() + SHARE * run.left(), list(TILINGS)
    for name in () if reason else rows:
        seconds = min(SECONDS, end - time.monotonic())
        if seconds < ENOUGH:
            return
        try:
            run.machine.forget()  # the process needs the memory
            rows[name] = in_process(Path(__file__), [name, tilings], seconds)
        except Exception as error:
            rows[name] = {"error": clean(describe(error))}
        tilings = [tiling for tiling in tilings if str(tiling) not in rows[name].get("error", "")]
        run.write()


def build(cell: Cell, tiling: Tiling, target="auto"):
    """A function `(values [out, in/2], indices int16 [out, in/16], x [tokens, in], result [tokens, out])`, compiled."""
    import tilelang
    import tilelang.language as T

    m, n, k = cell.layer.out, cell.tokens, cell.layer.inputs
    bm, bn, bk, stages, threads = tiling
    # A tail of k would be left out without a word (tilelang#2605), and a loop of one step hangs (tilelang#2566).
    if m % bm or n % bn or k % bk or k < 2 * bk:
        raise ValueError(f"tiles of {tiling} do not fit {m} x {n} x {k}")

    @T.prim_func
    def product(
        values: T.Tensor((m, k // 2), T.bfloat16),
        indices: T.Tensor((m, k // 16), T.int16),
        x: T.Tensor((n, k), T.bfloat16),
        result: T.Tensor((n, m), T.bfloat16),
    ):
        with T.Kernel(m // bm, n // bn, threads=threads) as (i, j):
            kept = T.alloc_shared((bm, bk // 2), T.bfloat16)
            places = T.alloc_shared((bm, bk // 16), T.int16)
            dense = T.alloc_shared((bn, bk), T.bfloat16)
            turned = T.alloc_shared((bn, bm), T.bfloat16)
            sums = T.alloc_fragment((bm, bn), T.float32)
            T.use_swizzle(8)  # neighbouring blocks share tiles of both operands in the L2 cache
            T.clear(sums)
            for step in T.Pipelined(k // bk, num_stages=stages):
                T.copy(values[i * bm, step * (bk // 2)], kept)
                T.copy(indices[i * bm, step * (bk // 16)], places)
                T.copy(x[j * bn, step * bk], dense)
                # Full rows: each group of 128 threads takes all columns, by the widest instruction.
                T.gemm_sp(kept, places, dense, sums, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
            for row, column in T.Parallel(bm, bn):
                turned[column, row] = sums[row, column]
            T.copy(turned, result[j * bn, i * bm])

    return tilelang.compile(product, target=target)


def measure(cell: Cell, tilings: list[Tiling], run) -> dict:
    """All ways in turn, and how the fastest tiling compares."""
    from products import Operands  # which imports this file

    start = time.monotonic()
    with ThreadPoolExecutor() as pool:
        builds = {str(tiling): pool.submit(build, cell, tiling) for tiling in tilings}
    compile_s = round(time.monotonic() - start, 1)
    operands, (tokens, out, inputs) = Operands(run, cell), (cell.tokens, cell.layer.out, cell.layer.inputs)
    values, indices = kernels.pack_nm(operands.sparse)
    algorithm = kernels.plan_linear(tokens, out, inputs, cell.dtype, run.machine.device, "cusparselt")

    def product(name: str, x: Tensor) -> Tensor:
        if name == "dense":  # of a weight without zeros: with them it would draw less power and run faster
            return nn.functional.linear(x, operands.weight)
        if name == "cuSPARSELt":
            return kernels.sparse_linear(x, operands.packed["output"], algorithm=algorithm)
        result = x.new_empty((tokens, out))
        builds[name].result()(values, indices.view(torch.int16), x, result)  # or raises what compiling has raised
        return result

    names, wrong, x = ["dense"], {}, operands.sets[0][0]
    truth, dense = x.float() @ operands.sparse.float().t(), nn.functional.linear(x, operands.sparse)
    for name in ("cuSPARSELt", *builds):
        print(f"checking {name}", flush=True)  # the last words of a process that hangs
        try:
            first = product(name, x)
            assert_three_way(first, dense, truth, name)
            assert torch.equal(first, product(name, x)), f"{name}: other bits the second time"
            names.append(name)
        except Exception as error:
            wrong[name] = {"error": why(error)}
            try:
                x.sum().item()
            except Exception:  # a fault: nothing will run in this process any more
                raise RuntimeError(f"checking {name}: {why(error)}") from error
    print("timing", flush=True)
    makers = {name: lambda name=name: [lambda x=x: product(name, x) for x, _ in operands.sets] for name in names}
    times, clocks = side_by_side(run, makers, 40)
    timed = {name: times[name]["median_us"] for name in builds if "median_us" in times.get(name, {})}
    best = min(timed, key=timed.get, default=None)
    verdict = judged("TileLang over cuSPARSELt", ratio(times, "cuSPARSELt", best), FASTER)
    found = {"best": best, "times_dense": ratio(times, "dense", best), "verdict": verdict, "times": times | wrong}
    return found | {"clocks": clocks, "algorithm": list(algorithm), "compile_s": compile_s}


def why(error: Exception) -> str:
    """One line. An error of TileLang's may begin with all the source, and what nvcc says of it comes after."""
    said = [line for line in str(error).splitlines() if re.search(r"\b(error|fatal)\s*:\s*\S", line)]
    return clean(f"{type(error).__name__}: {said[0].strip()}"[:300] if said else describe(error))


if __name__ == "__main__":
    wanted, given = json.loads(sys.argv[1])
    try:
        this = next(cell for cell in CELLS if str(cell) == wanted)
        alone = SimpleNamespace(machine=Cuda(), left=lambda reserve=0: SECONDS - reserve)
        answer = measure(this, [Tiling(*tiling) for tiling in given], alone)
    except Exception as error:
        answer = {"error": why(error)}
    print("\n" + MARK + json.dumps(answer), flush=True)
