"""Files of the blocks that a `oneshot` has finished, from which a later call with the same arguments goes on."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from os import PathLike
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..files import locked_directory, written_whole
from .calibration import Block
from .replay import ModelInputs
from .report import LayerReport

_MASK, _FILE = "mask of ", "block-{:04}.safetensors"


class FinishedBlocks:
    """One safetensors file for each finished block: its parameters, the masks, and what the report says of it.

    `directory` None keeps nothing. `settings` are all other arguments of `oneshot`, as plain values. The directory is
    locked until `close()`.
    """

    def __init__(
        self,
        directory: str | PathLike | None,
        model: nn.Module,
        batches: list[ModelInputs],
        settings: dict[str, object],
    ):
        self.directory = None if directory is None else Path(directory)
        self._paths: dict[str, Path] = {}
        lock = ExitStack()
        self.close = lock.close
        if self.directory is None:
            return
        self._run = fingerprint(model, batches, settings)
        given = f"resume_dir={str(directory)!r}"
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.directory.glob("block-*.safetensors")):
            facts = _facts(path)
            if facts["run"] != self._run:
                other = "has blocks of another model, or of other data, arguments, autocast or versions"
                raise ValueError(f"{given} {other}: name another directory, or delete it")
            if path.name == _FILE.format(len(self._paths)):  # what is behind a missing file is pruned again
                self._paths[facts["block"]] = path
        lock.enter_context(locked_directory(self.directory, f"another process uses {given}: name another directory"))

    def __contains__(self, block: object) -> bool:
        return block in self._paths

    def save(self, block: Block) -> None:
        if self.directory is None:
            return
        tensors = {key: value.detach().cpu().contiguous() for key, value in block.module.named_parameters()}
        tensors |= {_MASK + key: mask.cpu().contiguous() for key, mask in block.masks.items()}
        facts = {"run": self._run, "block": block.name, "content": _hash(tensors)}
        facts["report"] = json.dumps([block.errors, *map(vars, block.layers)])
        path = self.directory / _FILE.format(len(self._paths))
        with written_whole(path) as part:
            save_file(tensors, part, facts)
        self._paths[block.name] = path

    def load(self, block: Block) -> None:
        """Restore a pruned block from its file: its parameters, and what pruning made of it."""
        path, device = self._paths[block.name], next(block.module.parameters()).device
        tensors, facts = load_file(path), _facts(path)
        if facts["content"] != _hash(tensors):
            raise _damaged(path)
        for key, parameter in block.module.named_parameters():
            parameter.copy_(tensors[key])
        block.masks = {k.removeprefix(_MASK): mask.to(device) for k, mask in tensors.items() if k.startswith(_MASK)}
        block.errors, *layers = json.loads(facts["report"])
        block.layers = [LayerReport(**layer) for layer in layers]


def _facts(path: Path) -> dict[str, str]:
    facts: dict[str, str] = {}
    with suppress(SafetensorError), safe_open(path, "pt") as file:
        facts |= file.metadata() or {}
    if not {"run", "block", "report", "content"} <= facts.keys():
        raise _damaged(path)
    return facts


def _damaged(path: Path) -> ValueError:
    return ValueError(f"{path} is damaged, or no block of oneshot: delete it; it is pruned again with all after it")


def fingerprint(model: nn.Module, batches: list[ModelInputs], settings: dict[str, object]) -> str:
    """Return a hash of all that pruned blocks follow from."""
    device = next(model.parameters()).device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    config = model.config.to_diff_dict() if isinstance(model, PreTrainedModel) else None
    tensors = [{name: x for name, x in batch.items() if isinstance(x, Tensor)} for batch in batches]
    others = [{name: x for name, x in batch.items() if not isinstance(x, Tensor)} for batch in batches]
    facts = [settings, str(autocast), type(model).__qualname__, config, *filter(None, others)]
    return _hash(model.state_dict(), *tensors, facts=json.dumps(facts, sort_keys=True, default=str))


def _hash(*groups: Mapping[str, Tensor], facts: str = "") -> str:
    """A hash of `facts`, and of names, shapes, dtypes and bytes of tensors."""
    found = hashlib.sha256(facts.encode())
    for index, tensors in enumerate(groups):
        for name, value in sorted(tensors.items()):
            found.update(f"\n{index} {name} {value.dtype} {list(value.shape)}\n".encode())
            found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
