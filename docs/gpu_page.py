"""The page of what ran on an H100, from the committed results, so that it cannot drift."""

import json
import sys
from pathlib import Path
from typing import Any

# ruff: noqa: E402 (imports come after the path that they need)
ROOT = Path(__file__).resolve().parent.parent
sys.path += [path for path in (str(ROOT),) if path not in sys.path]

from hf_sparse24.tables import markdown_table
from recipes.benchmarks import step_budget

Rows = dict[str, Any]
GEMMS = ("output", "grad_input", "grad_weight")
COMPRESSED, COPIES = "compress by cuSPARSELt, us", "copy of as many bf16 numbers, us"
EQUAL = "equal to the library's, bit for bit"

INTRO = """# On an H100

This code ran on an H100 for 15 minutes. One GEMM with a 2:4 operand was {least:.2f} to {most:.2f} times as fast as
dense at the sizes of Llama 8B's MLPs and of Llama 13B. A training step did not gain: {steps}.

- Every sparse GEMM was compared with fp32 before its time counted. Dense is cuBLAS, at {tflops:.0f} TFLOP/s.
- GEMMs and kernels are timed as CUDA graphs, with cold caches. Steps are whole steps of the Trainer, as users run it.
- It was a virtual machine with 16 cores. On another host the parts that the host takes differ.

## One GEMM

Times as fast as dense, at 8192 tokens in bf16, the operand compressed before:"""

TUNING = """cuSPARSELt's default algorithm takes {default} times as long as dense for the output and grad_input of
Llama 8B's largest layer. By the library's own search `hf-sparse24 tune` finds id 17 for them, and 3 for grad_weight.

## Pruning and compressing

A weight is pruned in every step, and a gradient in every backward pass. To compress it, cuSPARSELt takes {longer} times
as long as a copy, and longer than a GEMM. On compute capability 9.0 our kernels write its layout in the pass that
prunes. Microseconds:"""

CALCULATED = """The bytes equal the library's at all {sizes} sizes that were tried. Every process compares
them once, at a small size.

Calculated from these times, forward and backward of a 14336 x 4096 layer by `t-sr-ste`, three GEMMs, pruning and
MVUE: {sparse:.0f} us, where dense takes {dense:.0f} us. That is {ratio:.2f} times as fast. As a whole it was not timed.

## A training step

Four layers of the shapes of Llama 8B, 4 x 2048 tokens, MLPs sparse, fp32 masters under autocast, fused AdamW; the mean
of eight steps, one run:"""

WHY = """Why it was slower is not known: nothing profiled it. The GPU's work does not explain it, see below. What was
seen or counted of the host:

- It starts a sparse GEMM in {cslt} us, a dense one in {linear} us. torch's operator makes a plan in every call
  ([pytorch#177866](https://github.com/pytorch/pytorch/issues/177866)).
- The Trainer waits for the GPU once a step, so the host cannot run ahead.
- The code of that run looked up in every call whether the layout is known: 48 times a step by `s-ste`, 72 by
  `t-sr-ste`, some 0.1 ms each on a CPU here.
- Whether that operator waits for the GPU is not known.

cuSPARSELt 0.8.0 is slower on Hopper than 0.8.1, which fixed that
([pytorch#177456](https://github.com/pytorch/pytorch/pull/177456)). How much of these times it costs is not known.

## Calculated, not measured

What the GPU has to do in that step, in milliseconds, from the kernels' times above. Waits for the host are not in it:

{budget}

Times as fast as dense by the same calculation. Weights are pruned once a step. The compiled step has masked decay in
one kernel:

{predicted}

Attention, optimizer and elementwise kernels were not timed: `recipes/benchmarks/step_budget.py` calculates them by
bytes and FLOP, with its assumptions. The weakest one: elementwise kernels take {eager:.0f} ms a micro-batch,
{compiled:.0f} ms compiled.

## Changed since then, not timed there

- cuSPARSELt is called directly, with plans that are kept. Python does less in a layer. Masked decay is a kernel.
- Under `torch.compile` weights are pruned once a step, not in every micro-batch.
- The layout is looked up once.
- `auto` leaves a GEMM dense that takes the GPU less time than starting a sparse one takes the host.
- The keys of random streams are copied without waiting for the GPU.

## What was right

The first-use checks of all Triton operators in bf16, fp16 and fp32 and of cuSPARSELt passed, except one.
The error of `packed_linear` in fp32 was above its bound, which was too tight for a long sum. The bound now grows with
the length of the sum. Checking took {bf16:.0f} s in bf16 and {fp32:.0f} s in fp32, with kernels that were
compiled before.

## Not run

- `make gpu-test` as a whole
- one layer forward and backward, Llama 1B and GPT-2, steps of several micro-batches, memory, 8-bit GEMMs: `make gpu`
  has them now
- decoding and packed weights, but for their check on first use
- `torch.compile` and CUDA graphs of a whole step
- any other GPU

Much of what that step runs has [changed since then](#changed-since-then-not-timed-there), and nothing has run again."""


def read(folder: Path, name: str) -> Rows:
    return json.loads((folder / f"h100_{name}.json").read_text())


def gemm_rows(folder: Path) -> Rows:
    return read(folder, "gemms")["sections"]["GEMMs"]["rows"]


def large_layers(folder: Path) -> dict[str, dict[str, float]]:
    """`layers`, those of Llama 8B's MLPs and of Llama 13B."""
    return {name: gains for name, gains in layers(gemm_rows(folder)).items() if "8B MLP" in name or "13B" in name}


def gains_of_large(folder: Path) -> list[float]:
    return [gain for gains in large_layers(folder).values() for gain in gains.values()]


def steps(folder: Path) -> dict[str, float]:
    """Milliseconds of a training step, by method."""
    (row,) = read(folder, "training")["sections"]["training runs"]["rows"].values()
    return {way: time["us"] / 1e3 for way, time in row["times"].items()}


def page(folder: Path) -> str:
    """The page of the results in a folder."""
    rows, first, step, large = gemm_rows(folder), read(folder, "first_run"), steps(folder), gains_of_large(folder)
    up = {name: rows[f"Llama 8B MLP up 14336x4096, 8192 tokens: {name}"]["times"] for name in GEMMS}
    slow = [up[name]["default"]["us"] / up[name]["dense"]["us"] for name in GEMMS[:2]]
    forms = {name: times for name, times in first.items() if name.startswith("forms of")}
    weight, gradient, _ = forms.values()
    sparse = sum(times["sparse"]["us"] for times in up.values()) + weight["mask: compressed both ways"]
    sparse, dense = sparse + gradient["MVUE: compressed"], sum(times["dense"]["us"] for times in up.values())
    host, copies = first["host, us"], first[COPIES]
    longer = [us / copies[size] for size, us in first[COMPRESSED].items()]
    slower = " and ".join(f"{step['dense'] / step[way]:.2f} times as fast by `{way}`" for way in ("s-ste", "t-sr-ste"))
    gains = [[name, *(f"{cells[gemm]:.2f}" for gemm in GEMMS)] for name, cells in layers(rows).items()]
    rates = [row["facts"]["dense, TFLOP/s"] for name, row in rows.items() if "8B MLP" in name]
    parts = [
        INTRO.format(least=min(large), most=max(large), steps=slower, tflops=sum(rates) / len(rates)),
        markdown_table(["layer", *GEMMS], gains),
        TUNING.format(default=f"{min(slow):.2f} to {max(slow):.2f}", longer=f"{min(longer):.0f} to {max(longer):.0f}"),
        markdown_table(["matrix", "what", "us"], [*compressions(first), *of_forms(forms)]),
        CALCULATED.format(sizes=len(first[EQUAL]), sparse=sparse, dense=dense, ratio=dense / sparse),
        markdown_table(
            ["", "ms a step", "times as fast as dense"],
            [[way, f"{ms:.0f}", f"{step['dense'] / ms:.2f}"] for way, ms in step.items()],
        ),
        WHY.format(
            cslt=host["8192 tokens: torch's sparse GEMM"],
            linear=host["8192 tokens: F.linear"],
            bf16=first["first use, s"]["bfloat16"],
            fp32=first["first use, s"]["float32"],
            **calculated(folder),
        ),
        made(first["environment"]),
    ]
    return "\n\n".join(parts) + "\n"


def calculated(folder: Path) -> Rows:
    ways = {way: step_budget.work(way, folder=folder) for way in step_budget.SPARSE}
    parts = [[what, *(f"{found[what]:.1f}" for found in ways.values())] for what in ways["dense"]]
    parts.append(["together", *(f"{sum(found.values()):.0f}" for found in ways.values())])
    sparse = list(ways)[1:]
    gains = [
        [name, *(f"{step_budget.gain(way, *case, folder):.2f}" for way in sparse)]
        for name, case in step_budget.CASES.items()
    ]
    return step_budget.ELEMENTWISE_MS | {
        "budget": markdown_table(["ms", *ways], parts),
        "predicted": markdown_table(["", *sparse], gains),
    }


def layers(rows: Rows) -> dict[str, dict[str, float]]:
    """Times dense of each GEMM, by layer, at 8192 tokens."""
    found: dict[str, dict[str, float]] = {}
    for name, row in rows.items():
        layer, gemm = name.split(": ")
        if layer.endswith(", 8192 tokens"):
            times = row["times"]
            found.setdefault(layer.removesuffix(", 8192 tokens"), {})[gemm] = (
                times["dense"]["us"] / times["sparse"]["us"]
            )
    return found


def compressions(first: Rows) -> list[list[str]]:
    return [
        [f"{size}, bf16", "compressed by cuSPARSELt; a copy", f"{us}; {first[COPIES][size]}"]
        for size, us in first[COMPRESSED].items()
    ]


def of_forms(forms: Rows) -> list[list[str]]:
    cells = ((title.removesuffix(", us").removeprefix("forms of a "), times) for title, times in forms.items())
    return [[title, what, f"{us:.0f}"] for title, times in cells for what, us in times.items()]


def made(environment: Rows) -> str:
    libraries = f"torch {environment['torch']}, Triton {environment['triton']}, cuSPARSELt 0.8.0"
    return f"{environment['device']}, driver {environment['driver']}, {libraries}. Files: `recipes/results/gpu/`."
