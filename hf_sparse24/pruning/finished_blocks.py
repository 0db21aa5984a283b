"""Files of the blocks that a `oneshot` has finished, from which a later call with the same arguments goes on."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..files import written_whole
from .replay import ModelInputs

_MASK = "mask of "


class FinishedBlocks:
    """One safetensors file for each finished block: its parameters, the masks, and what the report says of it.

    `directory` None keeps nothing. `settings` are all other arguments of `oneshot`, as plain values.
    """

    def __init__(
        self,
        directory: str | os.PathLike | None,
        model: nn.Module,
        batches: Iterable[ModelInputs],
        settings: dict[str, Any],
    ):
        self.directory = None if directory is None else Path(directory)
        self._paths: dict[str, Path] = {}
        if self.directory is None:
            return
        self._run = _fingerprint(model, batches, settings)
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.directory.glob("block-*.safetensors")):
            facts = _facts(path)
            if facts["run"] != self._run:
                raise ValueError(
                    f"resume_dir={str(directory)!r} has blocks of another model, or of other data or arguments: name "
                    f"another directory, or delete it"
                )
            self._paths[facts["block"]] = path

    def __contains__(self, block: object) -> bool:
        return block in self._paths

    def save(self, name: str, block: nn.Module, masks: dict[str, Tensor], report: dict[str, Any]) -> None:
        """Write a finished block, with the masks of its weights by name."""
        if self.directory is None:
            return
        tensors = {key: value.detach().cpu().contiguous() for key, value in block.named_parameters()}
        tensors |= {_MASK + key: mask.cpu().contiguous() for key, mask in masks.items()}
        path = self.directory / f"block-{len(self._paths):04}.safetensors"
        with written_whole(path) as part:
            save_file(tensors, part, {"run": self._run, "block": name, "report": json.dumps(report)})
        self._paths[name] = path

    def load(self, name: str, block: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Write a finished block's parameters into the model; returns the masks and the report."""
        tensors, device = load_file(self._paths[name]), next(block.parameters()).device
        for key, parameter in block.named_parameters():
            parameter.copy_(tensors[key])
        masks = {k.removeprefix(_MASK): mask.to(device) for k, mask in tensors.items() if k.startswith(_MASK)}
        return masks, json.loads(_facts(self._paths[name])["report"])


def _facts(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata())


def _fingerprint(model: nn.Module, batches: Iterable[ModelInputs], settings: dict[str, Any]) -> str:
    found = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            total = parameter.double().sum().item()  # its last digits depend on the number of threads
            found.update(f"{name} {list(parameter.shape)} {parameter.dtype} {total:.8e}".encode())
    for batch in batches:
        for name, value in sorted(batch.items()):
            found.update(name.encode() + value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
