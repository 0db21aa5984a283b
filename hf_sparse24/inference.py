"""Inference from compressed weights alone, with the dense master weights given up."""

import torch
from torch import nn

from .patching import sparse_layers


def drop_master_weights(model: nn.Module) -> int:
    """Keep of every patched layer only what the output product needs: 9/16 of its bytes in bf16 and fp16.

    In place, and one way: afterwards the model computes under `torch.no_grad()` and nothing else. To train, save,
    export or move it, load it again. Layers whose products cannot run on sparse tensor cores stay as they are.
    Products run sparse from now on even where dense math was faster, as it can be for a few tokens; where every
    algorithm has failed the tuner's checks for a number of tokens, they raise.

    Args:
        model: a patched model in its sparse phase, in the dtype it will compute in, on its device.

    Returns:
        Bytes of memory freed.

    Raises:
        ValueError: the model is not patched, is in its dense phase, or has no layer that could give up its weight (the
            reason of the first is told).
    """
    layers = sparse_layers(model)
    if not layers:
        raise ValueError("the model is not patched; call patch_model(model) first")
    if any(layer.phase == "dense" for layer in layers.values()):
        raise ValueError("the model is in its dense phase: it computes with the dense weights, and needs them")
    obstacles = {name: layer.why_not_sparse() for name, layer in layers.items()}
    served = [layer for name, layer in layers.items() if obstacles[name] is None and not layer.operands.frozen]
    if not served:
        name, reason = next(iter(obstacles.items()))
        raise ValueError(f"no weight can be dropped: {name}: {reason or 'dropped already'}")
    freed, dropped = 0, {}
    for layer in served:
        weight = layer.weight
        if id(weight) not in dropped:  # layers may share one
            (compressed,) = layer.operands_of(["compressed"], weight.dtype)
            freed += weight.nbytes - compressed.nbytes
            empty = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
            dropped[id(weight)] = weight, compressed, empty
        _, compressed, layer.weight = dropped[id(weight)]
        layer.operands.freeze(compressed)
    return freed
