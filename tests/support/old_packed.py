"""Packed checkpoints of versions 1 and 2 of the format, which hf_sparse24 reads and writes no more."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def indices_of(mask: Tensor) -> Tensor:
    """The 2-bit places of the two values of every four, four places a byte, of a 2:4 mask of a bit a weight."""
    bits = (mask[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).view(*mask.shape[:-1], -1, 4)
    places = bits.nonzero()[:, -1].view(*mask.shape, 4).to(torch.uint8)
    return (places << torch.tensor([0, 2, 4, 6], dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def write_old(directory: Path) -> None:
    """Turn a packed checkpoint of 2:4 weights in one file into version 1, or with int8 values version 2."""
    config = json.loads((directory / "config.json").read_text())
    packed = config["quantization_config"]["packed"]
    assert {*packed["weights"].values()} == {"2:4"}
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("_mask")]:
        tensors[f"{name.removesuffix('mask')}indices"] = indices_of(tensors.pop(name))
    save_file(tensors, file, {"format": "pt"})
    version = 2 if packed["values"] == "int8" else 1
    config["quantization_config"]["packed"] = {"version": version, "weights": [*packed["weights"]], "files": {}}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "sparse24.json").unlink(missing_ok=True)
