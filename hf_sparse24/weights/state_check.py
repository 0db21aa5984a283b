"""What is wrong with the state of a weight, where its method cannot have made it."""

from collections.abc import Mapping

import torch

from . import sharding
from .sparse_weight import SparseWeight


@torch.no_grad()
def wrong_state(weight: SparseWeight) -> str | None:
    """What is wrong with the state of a weight; None where nothing is, and while there is no data."""
    if weight.parameter.is_meta or not weight.state.is_ready:
        return None
    method = weight.method
    for name, found in weight.state.items():
        if weight.is_stack and found.shape[:1] != weight.parameter.shape[:1]:
            return f"{name} is of shape {tuple(found.shape)}, not one for each of {len(weight.parameter)} experts"
    without_data = torch.empty(weight.parameter.shape, dtype=weight.parameter.dtype, device="meta")
    views = weight.storage.views(without_data, {name: sharding.whole(tensor) for name, tensor in weight.state.items()})
    states = [method.init_state(view, *weight.run.progress) for view in views]
    for name in states[0]:
        made, found = weight.storage.stacked([state[name] for state in states]), weight.state[name]
        both_float = made.is_floating_point() and found.is_floating_point()  # in files, of any precision
        if found.shape != made.shape or not (both_float or found.dtype == made.dtype):
            return f"{name} is {found.dtype} {tuple(found.shape)}, not {made.dtype} {tuple(made.shape)}"
    for index, view in enumerate(views):
        reason = method.check_state(view)
        if reason:
            return f"expert {index}: {reason}" if weight.is_stack else reason
    return None


def wrong_states(weights: Mapping[str, SparseWeight]) -> str | None:
    """What is wrong with the state of the first few weights where something is; None where nothing is."""
    wrong = [f"{name}: {reason}" for name, weight in weights.items() if (reason := wrong_state(weight))]
    return "; ".join(wrong[:5]) or None
