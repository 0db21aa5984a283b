"""Install a wheel into a new environment, and use it there as a user would, away from this checkout.

    python tests/support/try_wheel.py dist/*.whl

Trains a tiny model, exports it packed, and reloads the export in a fresh process; `make dist` calls this.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from paths import ROOT

CONSTRAINTS = ROOT / "constraints.txt"

TRAIN = """
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_sparse24
from hf_sparse24 import Sparse24Config, Sparse24Controller, export_model, patch_model

assert Path(hf_sparse24.__file__).is_relative_to(sys.prefix), hf_sparse24.__file__
assert version("hf_sparse24") == hf_sparse24.__version__
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2))
print(patch_model(model, Sparse24Config(method="s-ste")))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
controller = Sparse24Controller(model, optimizer, total_steps=10)
tokens = torch.arange(64).repeat(2, 1)
losses = []
for _ in range(10):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
export_model(model, "packed", format="packed")
with torch.no_grad():
    torch.save(model.eval()(input_ids=tokens).logits, "logits.pt")
"""
RELOAD = """
import torch
from transformers import AutoModelForCausalLM

import hf_sparse24

model = AutoModelForCausalLM.from_pretrained("packed").eval()
with torch.no_grad():
    torch.testing.assert_close(model(input_ids=torch.arange(64).repeat(2, 1)).logits, torch.load("logits.pt"))
print("reloaded: the same logits")
"""


KERNELS = """
import sys

from sparse24_kernels.cpu.library import load

library = load()
assert not isinstance(library, str), library
assert library.functions._name.startswith(sys.prefix), library.functions._name
print("kernels:", *library.paths)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel.resolve()
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run([sys.executable, "-m", "venv", "venv"], cwd=directory, check=True)
        binaries = Path(directory) / "venv" / "bin"
        # Nothing that points at a checkout, and no network but for pip.
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
        with_kernels = not wheel.name.endswith("-any.whl")
        if with_kernels:
            environment["CXX"] = "/nowhere"  # none of them is compiled here
        for command in (
            [binaries / "python", "-m", "pip", "install", "-q", "-c", CONSTRAINTS, wheel],
            [binaries / "python", "-c", TRAIN],
            [binaries / "python", "-c", RELOAD],
            [binaries / "hf-sparse24", "--version"],
            [binaries / "hf-sparse24", "verify", "packed"],
            *([[binaries / "python", "-c", KERNELS]] if with_kernels else []),
        ):
            subprocess.run(command, cwd=directory, env=environment, check=True)
    print(f"{wheel.name}: works in a new environment")


if __name__ == "__main__":
    main()
