"""Train, export in both formats, and load in a fresh process: the same logits, 2:4, sizes as computed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import zoo
from paths import SUPPORT
from safetensors import safe_open
from safetensors.torch import save_file

from hf_sparse24 import Sparse24Config, Sparse24Controller, export_model, patch_model, sparse_weights
from hf_sparse24.checkpoints.export import FORMATS
from hf_sparse24_command import main as hf_sparse24

ARCHITECTURES = ["gpt2", "gpt_neox", "opt", "falcon", "llama", "qwen3", "gemma2", "phi3", "bert", "modernbert"]
ARCHITECTURES += ["mixtral", "qwen3_moe"]


def trained(name: str, steps: int = 3) -> torch.nn.Module:
    """A sparse model after some steps."""
    model = zoo.build(name)
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
    states = {name for key, weight in weights.items() for name in weight.state.in_model(key)}
    tensors = {x.data_ptr(): x for name, x in state_dict.items() if name not in weights and name not in states}
    packed = sum(x.numel() * (x.element_size() / 2 + 1 / 8) for x in map(state_dict.get, weights))
    dense = sum(x.nbytes for x in map(state_dict.get, weights))
    return sum(x.nbytes for x in tensors.values()) + int(dense if format == "dense" else packed)


def stored_bytes(directory: Path) -> int:
    total = 0
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118  not a dict
    return total


LOAD = """
import json, sys
import torch, zoo, hf_sparse24
from pathlib import Path
from safetensors.torch import load_file

torch.set_num_threads(1)
equal = []
for name, directory in json.loads(sys.argv[1]):
    model = zoo.auto_class(name).from_pretrained(directory)
    with torch.no_grad():
        logits = model(**zoo.batch()).logits
    equal.append(torch.equal(logits, load_file(Path(directory).parent / "logits.safetensors")["logits"]))
print(json.dumps(equal))  # the last line: libraries print too
"""


def load(exports: list[tuple[str, str]]) -> list[bool]:
    """Load exports in one fresh process: whether the logits of each are bit-equal."""
    path = os.pathsep.join([str(SUPPORT), *sys.path])
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD, json.dumps(exports)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def export(name: str, root: Path) -> list[tuple[str, str]]:
    """Train an architecture, export it in both formats, and check what is on disk."""
    model = trained(name)
    with torch.no_grad():
        save_file({"logits": model(**zoo.batch()).logits}, root / "logits.safetensors")
    for format in FORMATS:
        export_model(model, root / format, format)
        assert hf_sparse24(["verify", str(root / format)]) == 0
        assert stored_bytes(root / format) == expected_bytes(model, format)
    return [(name, str(root / format)) for format in FORMATS]
