"""Train, export in both formats, and load in a fresh process: the same logits, 2:4, sizes as computed, little memory.

    python tests/support/sharing.py 16 llama mixtral      # 16 times as wide; all architectures without names

For each architecture and format, a process of its own loads the export, so that its memory can be measured.
"""

import io
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import zoo
from paths import SUPPORT
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import utils

from hf_sparse24 import Sparse24Config, Sparse24Controller, export_model, patch_model, sparse_weights
from hf_sparse24.checkpoints.export import FORMATS
from hf_sparse24_command import main as hf_sparse24

ARCHITECTURES = [
    "gpt2",
    "gpt_neox",
    "opt",
    "falcon",
    "llama",
    "qwen3",
    "gemma2",
    "phi3",
    "bert",
    "modernbert",
    "mixtral",
    "qwen3_moe",
]
_WIDTHS = (
    "hidden_size",
    "n_embd",
    "dim",
    "word_embed_proj_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "ffn_dim",
    "hidden_dim",
    "head_dim",
)


def trained(name: str, scale: int, steps: int = 3) -> torch.nn.Module:
    """A sparse model after some steps."""
    defaults = (zoo.CAUSAL | zoo.MASKED | zoo.MOE)[name]
    widths = {key: defaults[key] * scale for key in _WIDTHS if key in defaults}
    model = zoo.build(name, **widths)
    patch_model(model, Sparse24Config(target_modules="all-linear"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    controller = Sparse24Controller(model, optimizer, total_steps=steps)
    for step in range(steps):
        model(**zoo.batch(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    controller.end()
    return model.eval()


def expected_bytes(model: torch.nn.Module, format: str) -> int:
    """What the tensors of an export take: a packed weight half of its elements, and two bits for each of these."""
    state_dict = model.state_dict()
    weights = sparse_weights(model)
    beside = {name for key, weight in weights.items() for name in weight.state.in_model(key)}
    tensors = {x.data_ptr(): x for name, x in state_dict.items() if name not in weights and name not in beside}
    packed = sum(x.numel() * (x.element_size() / 2 + 1 / 8) for x in map(state_dict.get, weights))
    dense = sum(x.nbytes for x in map(state_dict.get, weights))
    return sum(x.nbytes for x in tensors.values()) + int(dense if format == "dense" else packed)


def stored_bytes(directory: Path) -> int:
    total = 0
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118  not a dict
    return total


def resident() -> int:
    """Bytes of memory that this process has now."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) * 1024


def peak_of(call: Callable[[], Any]) -> tuple[Any, int]:
    """What a call returns, and by how many bytes the memory of the process grew at most meanwhile."""
    before, peaks, done = resident(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peaks.append(resident() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = call()
    finally:
        done.set()
        watcher.join()
    return result, max(peaks)


LOAD = """
import json, sys, tempfile
import torch, zoo, hf_sparse24
from pathlib import Path
from safetensors.torch import load_file
from sharing import peak_of

torch.set_num_threads(1)

tiny = zoo.build("llama")  # what the first model of a process needs, such as the code of operators, is not counted
hf_sparse24.patch_model(tiny)
with tempfile.TemporaryDirectory() as directory:
    hf_sparse24.export_model(tiny, directory, "packed")
    peak_of(lambda: zoo.auto_class("llama").from_pretrained(directory))[0](**zoo.batch())
rows = []
for name, directory in json.loads(sys.argv[1]):
    model, peak = peak_of(lambda: zoo.auto_class(name).from_pretrained(directory))
    with torch.no_grad():
        logits = model(**zoo.batch()).logits
    expected = load_file(Path(directory).parent / "logits.safetensors")["logits"]
    size = sum(x.nbytes for x in {x.data_ptr(): x for x in (*model.parameters(), *model.buffers())}.values())
    rows.append([torch.equal(logits, expected), (logits - expected).abs().max().item(), peak / size])
print(json.dumps(rows))  # the last line: libraries print too
"""


def load(exports: list[tuple[str, str]]) -> list[tuple[bool, float, float]]:
    """Load exports in one fresh process: whether logits are bit-equal, how far apart, and the peak memory over the
    model's size."""
    path = os.pathsep.join([str(SUPPORT), *sys.path])
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD, json.dumps(exports)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert run.returncode == 0, run.stderr
    return [tuple(row) for row in json.loads(run.stdout.splitlines()[-1])]


def export(name: str, scale: int, root: Path) -> list[tuple[str, str]]:
    """Train an architecture, export it in both formats, and check what is on disk."""
    model = trained(name, scale)
    with torch.no_grad():
        save_file({"logits": model(**zoo.batch()).logits}, root / "logits.safetensors")
    for format in FORMATS:
        export_model(model, root / format, format)
        assert hf_sparse24(["verify", str(root / format)]) == 0
        assert stored_bytes(root / format) == expected_bytes(model, format)
    return [(name, str(root / format)) for format in FORMATS]


def main(scale: int, names: list[str]) -> None:
    utils.logging.disable_progress_bar()
    utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    print("| architecture | format | MB | logits | peak of loading / model |\n|---|---|---|---|---|")
    for name in names or ARCHITECTURES:
        with tempfile.TemporaryDirectory() as root, redirect_stdout(io.StringIO()):
            exports = export(name, scale, Path(root))
            rows = [(*load([export])[0], stored_bytes(Path(export[1]))) for export in exports]
        for (equal, distance, peak, stored), format in zip(rows, FORMATS):
            said = "bit-equal" if equal else f"differ by {distance:.1e}"
            print(f"| {name} | {format} | {stored / 1e6:.1f} | {said} | {peak:.2f} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
