"""The GPU's work in a training step, calculated from the measured kernels of recipes/results/gpu/h100_*.json.

    python recipes/benchmarks/step_budget.py

Four layers of Llama 8B with 8192 tokens a micro-batch, fp32 masters under autocast to bf16, clipped gradients, fused
AdamW. Weights are pruned once a step, dense weights cast in every micro-batch. Time in which the GPU waits for the host
is not in it. Nor is what no file measures, but for the constants below.
"""

import json
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "results/gpu"
LAYERS, TOKENS, LENGTH, HIDDEN, INNER, VOCABULARY = 4, 8192, 2048, 4096, 14336, 32000
MLP = {(INNER, HIDDEN): ("MLP up", 2 * LAYERS), (HIDDEN, INNER): ("MLP down", LAYERS)}
ATTENTION = {(4096, HIDDEN): ("query", 2 * LAYERS), (1024, HIDDEN): ("key", 2 * LAYERS)}
"""By the out and in of a matrix: its name in the files, and how many there are."""
SPARSE = {
    "dense": (),
    "s-ste": ("output", "grad_weight"),  # its grad_input is a GEMM of a pruned weight in dense form
    "t-sr-ste": ("output", "grad_input", "grad_weight"),
}
ELEMENTWISE_MS = {"eager": 26.0, "compiled": 14.0}
"""Assumed, a micro-batch: norms, SwiGLU, rotary embedding, residuals, casts of activations, loss. Eager: 3 x 166 bytes
a token, hidden number and layer, and 32 a logit, at the speed of a copy; up to 39 if small kernels reach two thirds of
it. Compiled: not counted, half of eager."""
ATTENTION_FLOPS = 450e12
"""Assumed, forward and backward: FlashAttention-2 and 3 reach some 350 and 740 TFLOP/s forward (arXiv:2407.08608)."""
ADAMW, CLIPPING, DECAY = 28, 12, {"eager": 28, "compiled": 12}
"""Bytes that move a number: AdamW reads four fp32 and writes three; the norm reads one, its scaling reads and writes
one; masked decay in PyTorch makes seven such passes, and a kernel reads two and writes one."""


def work(way: str, micro: int = 1, mode: str = "eager", all_linear: bool = False, folder: Path = FOLDER) -> dict:
    """Milliseconds of a step by what takes them. Of the modes, "compiled" has a kernel for masked decay, too."""
    files = {name: json.loads((folder / f"h100_{name}.json").read_text()) for name in ("gemms", "first_run")}
    rows, first = files["gemms"]["sections"]["GEMMs"]["rows"], files["first_run"]
    weight = first["forms of a weight 14336x4096 in fp32, us"]
    gradient = first["forms of a gradient 8192x14336 in bf16, us"]
    speed = 4 * TOKENS * INNER / gradient["copy"]  # bytes a microsecond that a copy reads and writes
    per_number = {
        "dense": weight["cast to bf16"],
        # In one pass: the dense form, and 18 bits a number beside it of which 16 are for two of four values.
        "s-ste": weight["s-ste: dense"] + INNER * HIDDEN * 9 / 8 / speed,
        "t-sr-ste": weight["mask: compressed both ways"],
    }
    chosen = {} if way == "dense" else MLP | (ATTENTION if all_linear else {})
    us = dict.fromkeys(("MLP GEMMs", "other GEMMs", "attention", "casts and prunes", "MVUE"), 0.0)
    for (out, inputs), (name, count) in (MLP | ATTENTION).items():
        sparse = (out, inputs) in chosen
        for gemm in SPARSE["t-sr-ste"]:
            times = rows[f"Llama 8B {name} {out}x{inputs}, {TOKENS} tokens: {gemm}"]["times"]
            kind = "sparse" if sparse and gemm in SPARSE[way] else "dense"
            us["MLP GEMMs" if "MLP" in name else "other GEMMs"] += micro * count * times[kind]["us"]
        share = count * out * inputs / (INNER * HIDDEN)
        us["casts and prunes"] += share * (per_number[way] if sparse else micro * per_number["dense"])
        us["casts and prunes"] += share * micro * per_number["dense"]  # of gradients, to fp32
        us["MVUE"] += micro * count * gradient["MVUE: compressed"] * out / INNER * sparse
    up = rows[f"Llama 8B MLP up {INNER}x{HIDDEN}, {TOKENS} tokens: output"]["times"]["dense"]["us"]
    us["other GEMMs"] += 3 * micro * up * VOCABULARY / INNER  # the head's
    us["casts and prunes"] += 2 * micro * per_number["dense"] * VOCABULARY / INNER
    causal = 3.5 * 4 * TOKENS * LENGTH * HIDDEN / 2 * LAYERS  # backward takes 2.5 times the FLOP of forward
    us["attention"] = micro * causal / ATTENTION_FLOPS * 1e6
    us["elementwise"] = micro * ELEMENTWISE_MS[mode] * 1e3
    numbers = sum(out * inputs * count for (out, inputs), (_, count) in (MLP | ATTENTION).items())
    us["clipping, AdamW"] = (numbers + 2 * VOCABULARY * HIDDEN) * (ADAMW + CLIPPING) / speed
    decayed = sum(out * inputs * count for (out, inputs), (_, count) in chosen.items())
    us["masked decay"] = decayed * DECAY[mode] / speed * (way == "t-sr-ste")
    return {what: time / 1e3 for what, time in us.items()}


def gain(way: str, *case: object) -> float:
    """Times as fast as dense."""
    return sum(work("dense", *case).values()) / sum(work(way, *case).values())


CASES = {
    "eager, MLPs, 1 micro-batch": (1, "eager", False),
    "compiled, all linear layers, 1 micro-batch": (1, "compiled", True),
    "compiled, all linear layers, 8 micro-batches": (8, "compiled", True),
}

if __name__ == "__main__":
    ways = {way: work(way) for way in SPARSE}
    for what in ways["dense"]:
        print(f"{what:20s}", *(f"{way} {found[what]:6.1f} ms" for way, found in ways.items()), sep="  ")
    print(f"{'busy':20s}", *(f"{way} {sum(found.values()):6.1f} ms" for way, found in ways.items()), sep="  ")
    for name, case in CASES.items():
        print(f"{name:46s}", *(f"{way} {gain(way, *case):.2f}" for way in ("s-ste", "t-sr-ste")), sep="  ")
