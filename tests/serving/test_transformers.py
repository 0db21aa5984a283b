"""Transformers in a process that cannot import this library."""

import subprocess
import sys

import pytest
import serving
import sparse_models
import torch
import zoo
from checkpoints import patched

from hf_sparse24 import export_model

LOAD = """
import sys

import torch, transformers
torch.set_num_threads(1)
for name, directory in zip(sys.argv[1::2], sys.argv[2::2]):
    tokens, expected = torch.load(directory + "/expected.pt")
    model = getattr(transformers, name).from_pretrained(directory).eval()
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected), name
assert not any(name.startswith(("hf_sparse24", "sparse24")) for name in sys.modules)
"""


@pytest.mark.slow
def test_a_process_that_cannot_import_us_loads_an_export_and_says_nothing(tmp_path):
    arguments = []
    for name in ("llama", "gpt2", "bert"):
        model, tokens = patched(name), torch.randint(3, zoo.VOCAB, (3, 5))
        export_model(model, tmp_path / name)
        torch.save((tokens, sparse_models.logits(model, input_ids=tokens)), tmp_path / name / "expected.pt")
        arguments += [zoo.auto_class(name).__name__, str(tmp_path / name)]
    command = [sys.executable, "-W", "error", "-c", serving.WITHOUT_US + LOAD, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "quantization" not in done.stderr  # as of a training checkpoint
