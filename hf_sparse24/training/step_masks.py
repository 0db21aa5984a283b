"""StepMasks: masks and state of the sparse weights around each step; what is measured of masks; random streams."""

from collections.abc import Mapping

import torch
from sparse24_kernels.decay import masked_decay_
from sparse24_kernels.masks import count_flips
from torch import Tensor, nn
from transformers import TrainerState, TrainingArguments

from ..extensions import adapters_in
from ..progress import get_logger
from ..run import SparseRun, set_phase
from ..weights.rules import method_mask
from ..weights.sharding import compute_device, is_sharded, local, total
from ..weights.sparse_weight import SparseWeight, first_of_each, sparse_weights
from ..weights.storage import layer_name

logger = get_logger(__name__)


class StepMasks:
    """The masks and the state of a run around each optimizer step. All processes must call what measures."""

    def __init__(self, model: nn.Module, run: SparseRun, weights: Mapping[str, SparseWeight]):
        self._model, self._run, self._weights = model, run, weights
        adapted = (module.get_base_layer() for module in adapters_in(model))
        self._below = [weight for layer in adapted for weight in sparse_weights(layer).values()]
        self._find_trained()
        self._flips: dict[str, Tensor] = {}
        self._masks: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}  # the masks, as packed bits, from which on flips are measured

    def _find_trained(self) -> None:
        self.trained = {name: weight for name, weight in self._weights.items() if trains(weight)}
        # The model keeps its phase where nothing sparse trains, and where a weight is frozen below an adapter: no
        # schedule may change what that computes.
        self.is_frozen = not self.trained or not all(map(trains, self._below))

    def start_step(self, measures_flips: bool) -> None:
        """Right before the optimizer uses the gradients."""
        self._masks = {}
        self._find_trained()  # layers may have been unfrozen since
        # Where masks change at refreshes alone, `finish_step` measures their flips.
        if measures_flips and not self._run.method.flips_at_refresh:
            self._before = {name: self.mask(name) for name in first_of_each(self._weights)}
        elif self._before:  # the last chance to count those of an earlier step
            self._count()
        if stale := [name for name, weight in self._weights.items() if weight.encodings.is_stale()]:
            way = "call clear_encodings() of hf_sparse24.sparse_weights(model)[name] after such a write"
            logger.warning(f"{stale[0]} was written within a step, and compiled training did not see it: {way}")
        for weight in self._weights.values():
            weight.clear_encodings()  # the optimizer can use the memory

    def mask(self, name: str) -> Tensor:
        """The mask, as packed bits, of what this process updates of a weight, made once in a step."""
        if name not in self._masks:
            self._masks[name] = self._weights[name].local_mask(packed=True)
        return self._masks[name]

    def finish_step(self, refreshes: bool) -> None:
        """Right after the optimizer has changed the weights; `refreshes` makes their state again."""
        self._masks = {}
        method, is_dense = self._run.method, self._run.is_dense
        if is_dense and method.flips_at_refresh:
            self.flips = {}  # no mask is refreshed any more
        if refreshes:
            if method.flips_at_refresh:
                self._before = {name: weight.local_mask(packed=True) for name, weight in self.trained.items()}
            for weight in self.trained.values():
                weight.init_state()
        if method.keeps_zeros and not is_dense:
            # Moments of a dense start and optimizers such as Muon move what masks drop without a gradient, and a
            # patched dense model begins with its own weights.
            for weight in first_of_each(self.trained).values():
                if weight.master.requires_grad:
                    values = local(weight.master)
                    masked_decay_(values, values, weight.local_mask(packed=True), -1.0)  # w - w
        # Of a step and of the refresh after it. Where weights are sharded all processes count; `flips` may be read by
        # one. Otherwise they are counted when somebody reads them.
        if any(is_sharded(self._weights[name].master) for name in self._before):
            self._count()

    @property
    def flips(self) -> dict[str, Tensor]:
        """Entries of each weight, over all processes, that entered or left its mask in the last measurement."""
        if self._before:
            self._count()
        return self._flips

    @flips.setter
    def flips(self, flips: dict[str, Tensor]) -> None:
        self._flips, self._before = flips, {}

    @torch.no_grad()
    def _count(self) -> None:
        masters = [self._weights[name].master for name in self._before]
        after = [self._weights[name].local_mask(packed=True) for name in self._before]
        self.flips = dict(zip(self._before, total(list(count_flips([*self._before.values()], after)), masters)))

    def flip_rates(self) -> dict[str, float]:
        """The share of a weight's entries that have flipped, by its layer; of a shared weight, by the first of them."""
        sizes = {name: self._weights[name].master.numel() for name in self.flips}
        return {layer_name(name): float(flips) / sizes[name] for name, flips in self.flips.items()}

    def flip_rate(self) -> float:
        """The share of all measured entries that have flipped, after the first measurement."""
        return float(sum(self.flips.values())) / sum(self._weights[name].master.numel() for name in self.flips)

    def enter_phase(self, phase: str) -> bool:
        """Set the phase; make state where there is none, and where the model turns sparse, which is returned."""
        was_dense = self._run.is_dense
        set_phase(self._model, phase)
        turns_sparse = was_dense and not self._run.is_dense
        for name, weight in self._weights.items():
            if not weight.state.is_ready or (turns_sparse and name in self.trained):
                weight.init_state()
        return turns_sparse


def trains(weight: SparseWeight) -> bool:
    """Whether training changes the weight or a Parameter that its method adds."""
    return any(tensor.requires_grad for tensor in (weight.master, *weight.parameters.values()))


def measuring_interval(args: TrainingArguments, state: TrainerState) -> int:
    """The steps between two measurements of the flip rate in a Trainer's run: those between logs, 1 where unknown."""
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


class RandomStreams:
    """Fixes the draws of a model's weights until `end`, each by a scalar of one int64 tensor per device: a micro-step
    costs one copy to each device."""

    def __init__(self, weights: list[SparseWeight]):
        self._weights = weights
        splits = [weight.storage.is_split for weight in weights]
        # With tensor parallelism, weights that all ranks hold draw alike in all.
        self._by_rank = splits if any(splits) else [True] * len(weights)
        devices = [compute_device(weight.master) for weight in weights]
        self._keys = {device: torch.zeros(len(weights), dtype=torch.int64, device=device) for device in devices}
        for index, (weight, device) in enumerate(zip(weights, devices)):
            weight.rng_key = self._keys[device][index]

    def set(self, seed: int, rank: int, step: int, micro_step: int) -> None:
        begun = {by_rank: _mix(0, seed + rank * by_rank, step, micro_step) for by_rank in set(self._by_rank)}
        values = [_mix(begun[by_rank], i) >> 1 for i, by_rank in enumerate(self._by_rank)]
        fresh = torch.tensor(values, dtype=torch.int64, device="cpu")
        for keys in self._keys.values():
            # Of pinned memory: otherwise the host would wait for all that the GPU has been given.
            keys.copy_(fresh.pin_memory() if keys.is_cuda else fresh, non_blocking=True)

    def end(self) -> None:
        for weight in self._weights:
            weight.rng_key = None


def _mix(state: int, *numbers: int) -> int:
    """A 64-bit hash of integers (the finaliser of splitmix64), which may go on from the `state` of those before."""
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state
