"""Memory and time of training steps with dense weights, a fixed mask, and packed masters.

    python recipes/packed_master.py                 SmolLM2-135M's shape: each kind in a separate process, then paired
    python recipes/packed_master.py --model 1b      TinyLlama's shape, packed masters alone, two steps

Results go to recipes/results/packed_master.json. Memory is the process's peak (VmHWM, Linux) minus what it had before
the model was made (VmRSS). Before that, a tiny model has taken a step, so that the code of PyTorch and the library is
loaded. All trainings have the same aids: freed memory goes back to the system at once, and the rows that tied
embeddings look up are added to the gradient of the head, where autograd keeps two or three of that size for a while
(113 MB of SmolLM2's). "without_aids" is what comes out without them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.shapes import MODELS, Shape

from hf_sparse24 import Sparse24Config, Sparse24Controller, patch_model
from hf_sparse24.layers import packed
from hf_sparse24.version import __version__

OUTPUT = Path(__file__).with_name("results") / "packed_master.json"
KINDS = ("dense", "fixed-mask", "packed master")
SHAPES = {"smollm2-135m": MODELS["SmolLM2-135M"], "1b": Shape(2048, 5632, 22, 32, 4), "tiny": MODELS["tiny Llama"]}
TOKENS = (1, 64)
"""Sequences and tokens of each step."""
NO_AIDS = "SPARSE24_NO_AIDS"


class Training:
    """A model of a kind, its optimizer, and the same batches for every kind."""

    def __init__(self, shape: str, kind: str):
        torch.manual_seed(0)
        self.model = SHAPES[shape].build()
        if kind != "dense":
            master = "packed" if kind == "packed master" else "dense"
            patch_model(self.model, Sparse24Config(method="fixed-mask", target_modules="all-linear", master=master))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        if kind != "dense":
            Sparse24Controller(self.model, self.optimizer, total_steps=10_000)
        self.batches = torch.Generator().manual_seed(1)

    def step(self) -> float:
        ids = torch.randint(self.model.config.vocab_size, TOKENS, generator=self.batches)
        if self.model.config.tie_word_embeddings and NO_AIDS not in os.environ:
            embeddings: Any = self.model.get_input_embeddings().weight
            rows = torch.nn.functional.embedding(ids, embeddings.detach()).requires_grad_()
            loss = self.model(inputs_embeds=rows, labels=ids).loss
            loss.backward()
            embeddings.grad.index_add_(0, ids.flatten(), rows.grad.flatten(0, 1))
        else:
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
        self.optimizer.step()
        self.gradients = sum(p.grad.nbytes for p in self.model.parameters() if p.grad is not None)
        self.optimizer.zero_grad()
        return loss.item()


def resident_bytes(name: str) -> int:
    """Of this process: `"VmRSS"` now, `"VmHWM"` the most that there was."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def measure(shape: str, kind: str, steps: int) -> dict[str, Any]:
    """One training in this process."""
    Training("tiny", kind).step()
    before = resident_bytes("VmRSS")
    training = Training(shape, kind)
    made = resident_bytes("VmHWM") - before
    losses, seconds = [], []
    for _ in range(steps):
        began = time.perf_counter()
        losses.append(training.step())
        seconds.append(time.perf_counter() - began)
    state = [x for s in training.optimizer.state.values() for x in s.values() if x.dim()]
    return {
        "peak_bytes": resident_bytes("VmHWM") - before,
        "peak_bytes_of_making_it": made,
        "parameter_bytes": sum(p.nbytes for p in training.model.parameters()),
        "buffer_bytes": sum(b.nbytes for b in training.model.buffers()),
        "gradient_bytes": training.gradients,
        "optimizer_bytes": sum(x.nbytes for x in state),
        "losses": losses,
        "seconds": [round(s, 3) for s in seconds],
    }


def in_process(shape: str, kind: str, steps: int, aids: bool = True) -> dict[str, Any]:
    """`measure` in a separate process."""
    own = [sys.executable, __file__, "--model", shape, "--steps", str(steps), "--kind", kind]
    given = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "16384"} if aids else {NO_AIDS: "1"}
    out = subprocess.run(own, env=os.environ | given, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out.splitlines()[-1])


def paired(shape: str, turns: int) -> dict[str, Any]:
    """CPU seconds of a step of each kind by turns, in one process, so that other work on the machine counts little;
    packed masters also with dW in one whole GEMM."""
    trainings = {kind: Training(shape, kind) for kind in KINDS}
    block = packed.BLOCK_BYTES
    times: dict[str, list[float]] = {}
    for turn in range(-1, turns):  # the first warms up
        for name in (*KINDS, "packed master, whole dW"):
            packed.BLOCK_BYTES = 1 << 40 if name.endswith("whole dW") else block
            began = time.process_time()
            trainings[name.partition(",")[0]].step()
            if turn >= 0:
                times.setdefault(name, []).append(time.process_time() - began)
    packed.BLOCK_BYTES = block
    dense, blocks = times["dense"], times["packed master"]
    return {
        "turns": turns,
        "cpu_seconds": {name: round(statistics.median(found), 3) for name, found in times.items()},
        "over_dense": {
            name: round(statistics.median(a / b for a, b in zip(found, dense)), 3) for name, found in times.items()
        },
        "blocks_over_whole_dW": round(
            statistics.median(a / b for a, b in zip(blocks, times["packed master, whole dW"])), 3
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(SHAPES), default="smollm2-135m", help="the shape")
    parser.add_argument("--steps", type=int, help="optimizer steps of each training")
    parser.add_argument("--turns", type=int, default=10, help="steps of each kind by turns; 0: none")
    parser.add_argument("--kind", choices=KINDS, help="measure this one alone, and print it")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the JSON file that gets the results")
    options = parser.parse_args()
    steps = options.steps or (2 if options.model == "1b" else 5)
    if options.kind:
        print(json.dumps(measure(options.model, options.kind, steps)))
        return
    kinds = KINDS[2:] if options.model == "1b" else KINDS
    found: dict[str, Any] = {"tokens": TOKENS, "threads": torch.get_num_threads(), "device": "cpu"}
    found["versions"] = {"hf_sparse24": __version__, "torch": torch.__version__}
    found["kinds"] = {kind: in_process(options.model, kind, steps) for kind in kinds}
    if options.model != "1b":
        dense, own = found["kinds"]["dense"], found["kinds"]["packed master"]
        found["packed_over_dense"] = {
            name: round(own[name] / dense[name], 4) for name in dense if name.endswith("bytes") and dense[name] > 1e4
        }
        plain = {kind: in_process(options.model, kind, 2, aids=False)["peak_bytes"] for kind in (KINDS[0], KINDS[2])}
        found["without_aids"] = {"peak_bytes": plain, "packed_over_dense": round(plain[KINDS[2]] / plain[KINDS[0]], 4)}
        masked = found["kinds"]["fixed-mask"]["losses"]
        found["largest_loss_difference"] = max(abs(a - b) for a, b in zip(masked, own["losses"]))
        if options.turns:
            found["paired"] = paired(options.model, options.turns)
    saved = json.loads(options.output.read_text()) if options.output.exists() else {}
    options.output.write_text(json.dumps(saved | {options.model: found}, indent=2) + "\n")
    print(json.dumps({name: value for name, value in found.items() if name != "kinds"}, indent=2))


if __name__ == "__main__":
    main()
