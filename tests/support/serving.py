"""What tests of other engines share: their packages in separate folders, and the tokens that they should write."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from paths import ROOT
from transformers import AutoTokenizer, PreTrainedModel

ENGINES = ROOT / "tests/serving/engines.txt"
# SmolLM2 after magnitude pruning: from each, the second best of 16 tokens is always 0.1 of a logit behind the best.
PROMPTS = ["def fibonacci(n):", "Water boils at"]
NEW_TOKENS = 16
# How the code of a process begins that must not find this library.
WITHOUT_US = """
import sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hf_sparse24", "sparse24_kernels"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
"""


def prompts(folder: Path) -> list[torch.Tensor]:
    """PROMPTS as tokens `[1, length]` of a checkpoint's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer(prompt, return_tensors="pt").input_ids for prompt in PROMPTS]


def requirement(package: str) -> str:
    """The package as engines.txt pins it."""
    return re.search(rf"^{package}==.*", ENGINES.read_text(), re.MULTILINE)[0]


def install(folder: Path, *packages: str) -> dict[str, str]:
    """Install pinned packages into a folder, without what they depend on, and return an environment that finds them."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder]
    subprocess.run([*command, *map(requirement, packages)], check=True)
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "tests/support")])}


def run(command: list, environment: dict[str, str]) -> str:
    """What a Python process with these arguments prints; its errors are the test's."""
    done = subprocess.run([sys.executable, *map(str, command)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def greedy(model: PreTrainedModel, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The `[rows, NEW_TOKENS]` that Transformers writes after `tokens`, each time the most likely one."""
    mask = torch.ones_like(tokens) if mask is None else mask
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    return model.generate(input_ids=tokens, attention_mask=mask, **settings)[:, tokens.shape[1] :]
