"""StepMasks: the masks and the state of the sparse weights, which change between steps alone."""

from collections.abc import Mapping

from sparse24_kernels.decay import foreach_masked_decay_
from sparse24_kernels.dispatch import choose_kernels
from torch import Tensor, nn

from ..adapters.bypass import adapters_in
from ..run import SparseRun, set_phase
from ..weights.sharding import local
from ..weights.sparse_weight import SparseWeight, first_of_each, sparse_weights
from .mask_metrics import Flips


class StepMasks:
    """What happens to the sparse weights of a run around each optimizer step."""

    def __init__(self, model: nn.Module, run: SparseRun, weights: Mapping[str, SparseWeight]):
        self._model, self._run, self._weights = model, run, weights
        self.trained = {name: weight for name, weight in weights.items() if trains(weight)}
        # The model keeps its phase where nothing sparse trains, and where a weight is frozen below an adapter: no
        # schedule may change what that computes.
        adapted = (module.get_base_layer() for module in adapters_in(model))
        below = (weight for layer in adapted for weight in sparse_weights(layer).values())
        self.is_frozen = not self.trained or not all(map(trains, below))
        self.flips = Flips(weights)
        self._masks: dict[str, Tensor] = {}

    def start_step(self, measures_flips: bool) -> None:
        """Right before the optimizer uses the gradients."""
        self._masks = {}
        # Where masks change at refreshes alone, `finish_step` measures their flips.
        if measures_flips and not self._run.method.flips_at_refresh:
            self.flips.start({name: self.mask(name, packed=True) for name in first_of_each(self._weights)})
        for weight in self._weights.values():
            weight.clear_encodings()  # the optimizer can use the memory

    def mask(self, name: str, packed: bool = False) -> Tensor:
        """The mask of what this process updates of a weight, made once in a step however often it is used."""
        if name not in self._masks:
            weight = self._weights[name]
            # Bits are an eighth of the memory. In plain PyTorch packing costs more than it saves.
            has_kernels = choose_kernels(weight.master.device, operator="nm_mask").implementation != "reference"
            self._masks[name] = weight.local_mask(packed=packed or has_kernels)
        return self._masks[name]

    def finish_step(self, refreshes: bool) -> None:
        """Right after the optimizer has changed the weights; `refreshes` makes their state again."""
        self._masks = {}
        method, is_dense = self._run.method, self._run.is_dense
        if is_dense and method.flips_at_refresh:
            self.flips.counts = {}  # no mask is refreshed any more
        if refreshes:
            if method.flips_at_refresh:
                self.flips.start({name: weight.local_mask(packed=True) for name, weight in self.trained.items()})
            self._init_state()
        self.flips.finish()  # of a step and of the refresh after it
        if method.keeps_zeros and not is_dense:
            self._zero_dropped()

    def enter_phase(self, phase: str) -> bool:
        """Set the phase of the model. State starts from the weights where it turns sparse, which is returned."""
        was_dense = self._run.is_dense
        set_phase(self._model, phase)
        turns_sparse = was_dense and not self._run.is_dense
        if turns_sparse:
            self._init_state()
        return turns_sparse

    def complete_state(self) -> None:
        """Make the state of the weights that have none yet."""
        for weight in self._weights.values():
            if not weight.state.is_ready:
                weight.init_state()

    def _init_state(self) -> None:
        for weight in self.trained.values():
            weight.init_state()

    def _zero_dropped(self) -> None:
        """Set what the masks drop to zero: moments of a dense start and optimizers such as Muon move it without a
        gradient, and a patched dense model begins with its own weights."""
        weights = [weight for weight in first_of_each(self.trained).values() if weight.master.requires_grad]
        values, masks = [local(w.master) for w in weights], [w.local_mask(packed=True) for w in weights]
        foreach_masked_decay_(values, values, masks, [-1.0] * len(weights))  # w - w


def trains(weight: SparseWeight) -> bool:
    """Whether training changes the weight or a Parameter that its method adds."""
    return any(tensor.requires_grad for tensor in (weight.master, *weight.parameters.values()))
