"""Install distributions, each into a new environment without a compiler, and use them there as a user would.

    python tests/support/try_wheel.py dist/*

Trains and prunes a tiny model, exports it packed, and generates with the export in a fresh process. `make dist` and
`make wheel` call this.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
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
from hf_sparse24 import Sparse24Config, Sparse24Controller, export_model, oneshot, patch_model, unpatch_model

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
unpatch_model(model)
print(oneshot(model, [{"input_ids": tokens}], Sparse24Config(method="fixed-mask", target_modules="all-linear")))
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
written = model.generate(torch.arange(8)[None], max_new_tokens=8, do_sample=False)
assert written.shape == (1, 16), written
print("reloaded: the same logits;", *written[0].tolist())
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
    parser.add_argument("distributions", nargs="+", type=Path)
    for distribution in parser.parse_args().distributions:
        use(distribution.resolve())


def use(distribution: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run([sys.executable, "-m", "venv", "venv"], cwd=directory, check=True)
        binaries = Path(directory) / "venv" / "bin"
        # Nothing that points at a checkout, and no network but for pip.
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
        environment["CXX"] = "/nowhere"
        with_kernels = distribution.suffix == ".whl" and not distribution.name.endswith("-any.whl")
        start = time.monotonic()
        for command in (
            [binaries / "python", "-m", "pip", "install", "-q", "-c", CONSTRAINTS, distribution],
            [binaries / "python", "-c", TRAIN],
            [binaries / "python", "-c", RELOAD],
            [binaries / "hf-sparse24", "--version"],
            [binaries / "hf-sparse24", "verify", "packed"],
            *([[binaries / "python", "-c", KERNELS]] if with_kernels else []),
        ):
            subprocess.run(command, cwd=directory, env=environment, check=True)
            if "install" in command:
                taken = time.monotonic() - start
        size = sum(path.stat().st_size for path in Path(directory, "venv").rglob("*") if not path.is_symlink())
    print(f"{distribution.name}: works in a new environment, installed in {taken:.0f} s, {size / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
