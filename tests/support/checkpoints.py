"""What tests of checkpoints share: a sparse model to save, and a way to change a saved config."""

import json
from pathlib import Path
from typing import Any

import sparse_models
from transformers import PreTrainedModel


def patched(name: str = "llama", method: str = "s-ste", pattern: str = "2:4", **sizes: Any) -> PreTrainedModel:
    """A model in eval mode, all of whose linear layers are sparse."""
    return sparse_models.patched(name, sizes, method=method, pattern=pattern, target_modules="all-linear").eval()


def edit_config(directory: Path, **changes: Any) -> None:
    """Change fields of the saved Sparse24Config."""
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= changes
    (directory / "config.json").write_text(json.dumps(config))
