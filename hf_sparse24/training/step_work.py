"""StepWork: what happens around each optimizer step of a sparse training.

Forward decides nothing: gradient checkpointing and accumulation repeat it. What changes during training changes here,
as the method says: phases, state such as masks, gradients; and the random streams of MVUE.
"""

from collections.abc import Mapping
from typing import Any

import torch
from sparse24_kernels.decay import foreach_masked_decay_
from sparse24_kernels.dispatch import choose_kernels
from torch import Tensor, nn

from ..adapters.merging import adapters_in
from ..methods import StepContext
from ..patching.surgery import set_phase
from ..run import SparseRun
from ..weights.sharding import local, rank
from ..weights.sparse_weight import SparseWeight, first_of_each, sparse_weights
from .mask_metrics import Flips
from .optimizers import TorchOptimizer
from .random_streams import RandomStreams
from .zero import ZeroOptimizer


class StepWork:
    """The base of `Sparse24Controller`: it takes over a run, and follows an optimizer until `end`."""

    def __init__(
        self,
        model: nn.Module,
        run: SparseRun,
        weights: Mapping[str, SparseWeight],
        optimizer: Any,
        total_steps: int,
        seed: int,
        step: int,
        metrics_interval: int,
    ):
        self.model, self.run, self.weights, self.optimizer = model, run, weights, optimizer
        self.total_steps, self.seed, self.metrics_interval = total_steps, seed, metrics_interval
        self.step, self.micro_step = step, 0
        self._trained = {name: weight for name, weight in weights.items() if trains(weight)}
        # Below an adapter, no schedule may change what a frozen weight computes.
        self._is_frozen = not self._trained or _any_frozen_below_adapters(model)
        if not self._keeps_phase:
            run.method.check_run(total_steps, optimizer)
        if run.controller is not None:
            run.controller.end()
        self._flips = Flips(weights)
        self._masks: dict[str, Tensor] = {}
        self._streams = RandomStreams(list(weights.values()))
        self._hooks: list[Any] = []
        run.controller = self
        self._enter_phase()
        for weight in weights.values():
            if not weight.state.is_ready:
                weight.init_state()

    def follow(self) -> None:
        """Run around the optimizer's steps from now on."""
        self._set_streams()
        self.run.open_step = object()
        is_zero = isinstance(self.optimizer, ZeroOptimizer)
        self._optimizer: Any = self.optimizer if is_zero else TorchOptimizer(self.optimizer)
        self._hooks += self._optimizer.follow(self._before_step, self._change_gradients, self._after_step)

    @property
    def is_running(self) -> bool:
        """Whether it follows the optimizer: it has not ended, and no other controller has taken the model over."""
        return self.run.controller is self

    def end(self) -> None:
        """Call where training stops before `total_steps`: pruned weights are no longer kept, and the optimizer's steps
        no longer followed."""
        for hook in self._hooks:
            hook.remove()
        if self.is_running:
            self.run.open_step = self.run.controller = None
            self._streams.end()

    @property
    def _keeps_phase(self) -> bool:
        return self._is_frozen or self.run.facts.finished

    @property
    def _has_own_optimizer(self) -> bool:
        return self.run.method.overrides("make_optimizer") and not self._keeps_phase

    @property
    def phase(self) -> str:
        """`"sparse"`, `"dense"`, or another phase of the method: how the model computes in the step that comes next.

        A model whose sparse weights are all frozen, or frozen below adapters, keeps its phase, as do copies of modules
        that train beside the adapters: all weights of a model are in one. So does a model that an earlier run has left
        dense at its end.
        """
        if self._keeps_phase:
            return self.run.phase
        return self.run.method.phase(self.step, self.total_steps, self.optimizer)

    def _before_step(self) -> None:
        """Right before the optimizer uses the gradients."""
        if self.step >= self.total_steps:
            raise RuntimeError(
                f"total_steps={self.total_steps} are done, and the optimizer takes another; make the controller with "
                f"the steps of the whole run, or call controller.end() to go on without it"
            )
        self._masks = {}
        # Where masks change at refreshes alone, `_refresh` measures their flips.
        if not self.run.method.flips_at_refresh and ((self.step + 1) % self.metrics_interval == 0 or self.step == 0):
            self._flips.start({name: self._mask(name, packed=True) for name in first_of_each(self.weights)})
        self.run.open_step = None
        for weight in self.weights.values():
            weight.clear_encodings()  # the optimizer can use the memory

    @torch.no_grad()
    def _change_gradients(self) -> None:
        """When the gradients of a step, or with ZeRO of a group, are final."""
        if self.run.method.overrides("change_gradients"):
            pieces = self._optimizer.pieces(self.weights, self._mask)
            self.run.method.change_gradients(pieces, self._context())

    def _mask(self, name: str, packed: bool = False) -> Tensor:
        """The mask of what this process updates of a weight, made once in a step however often it is used."""
        if name not in self._masks:
            weight = self.weights[name]
            # Bits are an eighth of the memory. In plain PyTorch packing costs more than it saves.
            has_kernels = choose_kernels(weight.master.device, operator="masks.nm_mask").backend != "reference"
            self._masks[name] = weight.local_mask(packed=packed or has_kernels)
        return self._masks[name]

    @torch.no_grad()
    def _after_step(self) -> None:
        """Right after an optimizer step: counts it, switches the phase, refreshes state."""
        self.step += 1
        self.micro_step = 0
        self._masks = {}
        turns_sparse = self._enter_phase()
        if self.run.is_dense and self.run.method.flips_at_refresh:
            self._flips.counts = {}  # no mask is refreshed any more
        if self.step == self.total_steps and not self._keeps_phase:
            self.run.record(finished=self.run.is_dense)
        keeps_state = turns_sparse or self.run.is_dense
        if not keeps_state and self.run.method.refreshes_state(self.step, self.total_steps):
            self._refresh()
        self._flips.finish()  # of a step and of the refresh after it
        if self.run.method.keeps_zeros and not self.run.is_dense:
            self._zero_dropped()
        self._set_streams()
        self.run.open_step = object() if self.step < self.total_steps else None

    def _enter_phase(self) -> bool:
        """Set the phase of the current step. State starts from the weights where it turns sparse, which is returned."""
        turns_sparse = self.run.is_dense
        set_phase(self.model, self.phase)
        turns_sparse = turns_sparse and not self.run.is_dense
        for weight in self._trained.values() if turns_sparse else ():
            weight.init_state()
        return turns_sparse

    def _refresh(self) -> None:
        """State anew of the weights that train; where only that changes masks, their flips are measured here."""
        if self.run.method.flips_at_refresh:
            self._flips.start({name: weight.local_mask(packed=True) for name, weight in self._trained.items()})
        for weight in self._trained.values():
            weight.init_state()

    def _zero_dropped(self) -> None:
        """Set what the masks drop to zero: moments of a dense start and optimizers such as Muon move it without a
        gradient, and a patched dense model begins with its own weights."""
        weights = [weight for weight in first_of_each(self._trained).values() if weight.master.requires_grad]
        values, masks = [local(w.master) for w in weights], [w.local_mask(packed=True) for w in weights]
        foreach_masked_decay_(values, values, masks, [-1.0] * len(weights))  # w - w

    def _context(self) -> StepContext:
        return StepContext(self.step, self.total_steps, self.phase, self.optimizer, self.weights)

    def _set_streams(self) -> None:
        self._streams.set(self.seed + rank(), self.step, self.micro_step)


def trains(weight: SparseWeight) -> bool:
    """Whether training changes the weight, or what the method keeps beside it."""
    return any(tensor.requires_grad for tensor in (weight.master, *weight.parameters.values()))


def _any_frozen_below_adapters(model: nn.Module) -> bool:
    adapted = (module.get_base_layer() for module in adapters_in(model))
    return any(not trains(weight) for layer in adapted for weight in sparse_weights(layer).values())
