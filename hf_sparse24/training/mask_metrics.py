"""Flip rates and kept magnitude of a model that trains."""

from collections.abc import Mapping

import torch
from sparse24_kernels.masks import count_flips
from torch import Tensor, nn
from transformers.trainer_callback import TrainerState
from transformers.training_args import TrainingArguments

from ..weights.rules import method_mask
from ..weights.sharding import local, total
from ..weights.sparse_weight import SparseWeight
from ..weights.storage import layer_name


class Flips:
    """How many entries of each weight have entered or left its mask. All processes must call its methods."""

    def __init__(self, weights: Mapping[str, SparseWeight]):
        self._weights = weights
        self._before: Mapping[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}  # 0-d, over all processes; empty before the first measurement

    def start(self, masks: Mapping[str, Tensor]) -> None:
        """Measure from these masks on: packed bits by name, of what this process updates."""
        self._before = masks

    def finish(self) -> None:
        """Measure up to the masks as they are now, if a measurement was started."""
        if not self._before:
            return
        after = [self._weights[name].local_mask(packed=True) for name in self._before]
        counts = list(count_flips(list(self._before.values()), after))
        self.counts = dict(zip(self._before, total(counts, [self._weights[name].master for name in self._before])))
        self._before = {}

    def rate(self) -> float | None:
        """The share of all measured entries that have flipped; None before the first measurement."""
        if not self.counts:
            return None
        sizes = sum(self._weights[name].master.numel() for name in self.counts)
        return float(sum(self.counts.values())) / sizes

    def layer_rates(self) -> dict[str, float]:
        """The same by layer; a weight that layers share stands under the first of them."""
        sizes = {name: self._weights[name].master.numel() for name in self.counts}
        return {layer_name(name): float(flips) / sizes[name] for name, flips in self.counts.items()}


def measuring_interval(args: TrainingArguments, state: TrainerState) -> int:
    """Every how many steps a Trainer's run measures the flip rate: at those that log."""
    # The steps that log by epoch are not known ahead.
    return max(1, int(state.logging_steps)) if args.logging_strategy == "steps" else 1


@torch.no_grad()
def fresh_masks(weights: Mapping[str, SparseWeight], model: nn.Module) -> list[Tensor]:
    """The masks, as packed bits, that these weights would have with new state and the values that `model` has."""
    parameters, masks = dict(model.named_parameters(remove_duplicate=False)), []
    for name, weight in weights.items():
        method, progress = weight.method, weight.run.progress
        views = [view._replace(state=method.init_state(view, *progress)) for view in weight.views(parameters[name])]
        masks.append(weight.storage.stacked([method_mask(method, view, packed=True) for view in views]))
    return masks


def kept_magnitude(weights: Mapping[str, SparseWeight]) -> float:
    """The share of the weights' L1 norm that their masks keep. All processes must call."""
    sums = []
    for weight in weights.values():
        magnitude = local(weight.master).float().abs()
        sums.append(torch.stack([(magnitude * weight.local_mask()).sum(), magnitude.sum()]).cpu())
    kept, all_of_it = total(sums, [weight.master for weight in weights.values()]).sum(0).tolist()
    return kept / max(all_of_it, 1e-38)
