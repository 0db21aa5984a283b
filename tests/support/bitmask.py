"""Checkpoints as compressed-tensors 0.9 to 0.14 wrote them, by an independent writer."""

import json
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

SPARSITY = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4", "targets": ["Linear"], "ignore": ["lm_head"]}


def kept(weight: Tensor) -> Tensor:
    """A mask of the two largest magnitudes of each four."""
    places = weight.view(-1, 4).abs().topk(2).indices
    return torch.zeros(weight.numel() // 4, 4, dtype=torch.bool).scatter_(1, places, True).view_as(weight)


def prune(model: PreTrainedModel) -> PreTrainedModel:
    for name, weight in model.named_parameters():
        if "_proj.weight" in name:
            weight.data *= kept(weight.data)
    return model.eval()


def write_bitmask(
    model: PreTrainedModel, directory: Path, ignore: str = "-", size: str = "5GB", suffix: str = ".weight"
) -> dict[str, Tensor]:
    """Save a pruned model; `ignore` is a part of the names of weights to leave dense, `suffix` the end of their names
    that the parts do not have. Returns what is in the files."""
    model.save_pretrained(directory)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if "_proj.weight" not in name or ignore in name:
            tensors[name] = tensor
            continue
        mask, module = kept(tensor), name.removesuffix(suffix)
        tensors[f"{module}.compressed"] = tensor[mask].view(len(tensor), -1)
        tensors[f"{module}.bitmask"] = torch.from_numpy(np.packbits(mask.numpy(), axis=1, bitorder="little"))
        tensors[f"{module}.shape"] = torch.tensor(tensor.shape).view(2, 1)
    write_files(directory, tensors, size)
    set_quantization(directory, sparsity_config=SPARSITY)
    return tensors


def write_files(directory: Path, tensors: dict[str, Tensor], size: str = "5GB") -> None:
    for path in directory.glob("*.safetensors"):
        path.unlink()
    shards = split_torch_state_dict_into_shards(tensors, max_shard_size=size)
    for file, names in shards.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, directory / file, metadata={"format": "pt"})
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def set_quantization(directory: Path, **fields: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "version": "0.14.0.1", **fields}
    (directory / "config.json").write_text(json.dumps(config))
