"""The random streams of MVUE: seed, step, micro-step and weight fix the draws of each layer."""

import torch
from torch import Tensor

from ..weights.sharding import compute_device
from ..weights.sparse_weight import SparseWeight


class RandomStreams:
    """Fixes the draws of a model's weights until `end`; then every draw is a new one again.

    Each weight gets a scalar of one int64 tensor per device, so that a micro-step costs one copy to each device.
    """

    def __init__(self, weights: list[SparseWeight]):
        self._weights = weights
        self._keys: list[tuple[list[int], Tensor]] = []  # per device, the indices of its weights and their keys
        by_device: dict[torch.device, list[int]] = {}
        for index, weight in enumerate(weights):
            by_device.setdefault(compute_device(weight.master), []).append(index)
        for device, indices in by_device.items():
            keys = torch.zeros(len(indices), dtype=torch.int64, device=device)
            for index, key in zip(indices, keys.unbind()):
                weights[index].rng_key = key
            self._keys.append((indices, keys))

    def set(self, seed: int, step: int, micro_step: int) -> None:
        for indices, keys in self._keys:
            values = [_mix(seed, step, micro_step, index) for index in indices]
            keys.copy_(torch.tensor(values, dtype=torch.int64))

    def end(self) -> None:
        for weight in self._weights:
            weight.rng_key = None


def _mix(*numbers: int) -> int:
    """A 63-bit hash of a few integers (the finaliser of splitmix64), so that nearby numbers give unrelated streams."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state >> 1
