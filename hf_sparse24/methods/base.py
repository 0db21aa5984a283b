"""SparseMethod: everything that a method decides, in one class. When each hook runs:

patch_model:
    unsupported(out, inputs)                          of each layer that could become sparse
    init_state(view, 0, 1), init_parameters(view)     of each weight; again when dense weights are loaded

make_optimizer(groups, total_steps, ...)              by Sparse24Trainer; in your own loop you make the optimizer
check_run(total_steps, optimizer)                     when the controller is made, before step 0 or a resumed one

for step in range(total_steps):
    phase(step, total_steps, optimizer)               from dense to another phase: init_state(view, step, ...)
    if the step before has not just made the state, and refreshes_state(step, total_steps):
        init_state(view, step, total_steps)
    for each micro-batch:
        forward of each layer, unless the phase is "dense":
            prune(view), prune_grad_input(view)       once in a step, not in each micro-batch
            adapt_output(x, output, parameters, phase)
        backward
    optimizer.step():
        change_gradients(pieces, context)             right before it; gradients are clipped and unscaled
    metrics(context)                                  when the Trainer logs

oneshot:                 adopt_mask(view, mask)
loading, exporting:      check_state(view)
exporting, unpatching:   prune(view), merge(pruned, parameters, phase)
merging an adapter:      state_of_pruned(view)
counting flips, decay:   mask(view)
"""

import dataclasses
from typing import Any, ClassVar

import torch
from sparse24_kernels import Pattern
from torch import Tensor

from ..weights.gemms import Gemms, standard_gemms
from ..weights.rules import Mask, Rule, mask_of
from ..weights.view import WeightView
from .context import DENSE_PHASE, Pieces, StepContext
from .schedule import Schedule
from .settings import GemmSettings, MethodSettings, PhaseSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class StandardSettings(PhaseSettings, GemmSettings):
    """The settings of a method that declares none: dense phases, and what happens in the three GEMMs."""


class SparseMethod:
    """A method of sparse training. One instance serves all weights of a model; it holds no tensors.

    To write one, implement `mask`, or `prune` where the weight is more than masked, and register the class:

        @register_method("my-method")
        class MyMethod(SparseMethod):
            def mask(self, view):
                return nm_mask(view.matrix, *self.pattern, view.dim)

    Everything else has a default. What computes on a `WeightView` is a pure function of it: it runs again when weights
    are loaded, and gradient checkpointing repeats the forward pass. What changes during training changes in the hooks
    that run between steps; `step` is the number of optimizer steps done, `total_steps` that of the whole run.

    You never make an instance: `patch_model` does, of the registered class.

    Args:
        settings: an instance of the class's `Settings`.
        pattern: N:M of the config.

    Attributes:
        settings: of the config.
        pattern: N:M of the config.
        gemms: the three GEMMs of a layer, by the settings.
    """

    name: ClassVar[str]
    """Set by `register_method`."""

    Settings: ClassVar[type[MethodSettings]] = StandardSettings
    """The frozen dataclass of the method's settings."""

    phases: ClassVar[tuple[str, ...]] = ("sparse", DENSE_PHASE)
    """In `"dense"` a layer computes with its master weight, in every other phase with what the method prunes it to."""

    transposable: ClassVar[bool] = False
    """Whether the weight of the grad_input GEMM is N:M along the output dimension, so that this GEMM can be sparse."""

    mask_is_local: ClassVar[bool] = False
    """Whether the mask of a part of a weight, in whole groups along the input dimension, follows from that part and its
    state. A weight that FSDP2 shards is gathered for its mask otherwise."""

    flips_at_refresh: ClassVar[bool] = False
    """Whether the mask changes only when state is refreshed: the flip rate is then that of the last refresh."""

    teacher_loss: ClassVar[tuple[float, float] | None] = None
    """Weight and temperature of the KL divergence of a method that is published with its dense model as teacher. They
    count where a teacher is given without a `DistillationConfig`."""

    settings_of_state: ClassVar[tuple[str, ...]] = ()
    """Settings by which `init_state` makes what is kept from then on, so that they cannot change later."""

    keeps_zeros: ClassVar[bool] = False
    """Whether what the mask drops stays zero while the model trains: its gradient is that of `mask * weight`, and each
    optimizer step leaves it at zero. Otherwise the gradient goes straight through to the dense master."""

    def __init__(self, settings: Any, pattern: Pattern):
        self.settings, self.pattern = settings, pattern
        names = [f.name for f in dataclasses.fields(GemmSettings)]
        chosen = {name: getattr(settings, name) for name in names if hasattr(settings, name)}
        own_grad_input = self.overrides("prune_grad_input")
        self.gemms: Gemms = standard_gemms(
            pattern, transposable=self.transposable, own_grad_input=own_grad_input, **chosen
        )

    @classmethod
    def overrides(cls, *hooks: str) -> bool:
        """Whether the class overrides one of these hooks; the library skips the work of a default."""
        return any(getattr(cls, hook) is not getattr(SparseMethod, hook) for hook in hooks)

    # What the GEMMs multiply by.

    def mask(self, view: WeightView) -> Tensor:
        """Which entries of `view.matrix` are kept: bool, its shape, at most N of every M along `view.dim`."""
        return mask_of(self.prune(view), view, self.pattern, packed=False)

    def prune(self, view: WeightView) -> Rule:
        """How the weight becomes N:M along `view.dim`: `Magnitude()`, `SoftThreshold(scale)`, `Mask(mask)` or
        `Values(tensor)`. The library makes the weight by it, in the forms that the GEMMs take. Default: `mask`."""
        return Mask(self.mask(view))

    def prune_grad_input(self, view: WeightView) -> Rule:
        """The same for the weight of the grad_input GEMM, where that is another one: with `transposable`, N:M along
        `1 - view.dim`, which this GEMM contracts. Default: `prune`'s, made once."""
        return self.prune(view)

    def unsupported(self, out: int, inputs: int) -> str | None:
        """Why a weight `[out, inputs]` cannot be sparse by this method; None where it can."""
        m = self.pattern.m
        if inputs % m:
            return f"input size {inputs} is not a multiple of {m}"
        if self.gemms.output.estimator != "none" and inputs % 4:
            return f"input size {inputs} is not a multiple of 4, as activations='2:4' needs"
        if self.transposable and out % m:
            return f"output size {out} is not a multiple of {m}, as {self.name!r} needs"
        return None

    # What a weight keeps.

    def init_state(self, view: WeightView, step: int, total_steps: int) -> dict[str, Tensor]:
        """Buffers to keep with a weight: a deterministic function of it and of the step; (0, 1) outside training.

        Runs when a model is patched (possibly on the meta device), after dense weights have been loaded, when sparsity
        begins after a dense start, and at refreshes.
        """
        return {}

    def refreshes_state(self, step: int, total_steps: int) -> bool:
        """Whether `init_state` runs again once `step` steps are done. It always runs where sparsity starts."""
        return False

    def init_parameters(self, view: WeightView) -> dict[str, Tensor]:
        """Trainable tensors to keep with a weight: a deterministic function of it, never views of `view.matrix`.

        Runs when a model is patched (possibly on the meta device) and after dense weights have been loaded. Optimizers,
        schedulers and checkpoints know the tensors from then on; they take part in training as early or late as
        `adapt_output` uses them. DDP needs `find_unused_parameters=True` until they do.
        """
        return {}

    def adapt_output(self, x: Tensor, output: Tensor, parameters: dict[str, Tensor], phase: str) -> Tensor:
        """What a layer returns in `phase`, given its input, the result of its GEMM, and its own `parameters`."""
        return output

    def merge(self, pruned: Tensor, parameters: dict[str, Tensor], phase: str) -> Tensor:
        """The one weight `[out, in]` that computes what the layer does with `pruned` and `adapt_output`."""
        return pruned

    def adopt_mask(self, view: WeightView, mask: Tensor) -> dict[str, Tensor]:
        """The state for a mask `[rows, columns]` that was chosen elsewhere, such as by `oneshot`: N of every M."""
        raise ValueError(f"method {self.name!r} chooses its own masks")

    def state_of_pruned(self, view: WeightView) -> dict[str, Tensor]:
        """The state with which `view.matrix`, which is N:M already, is pruned to itself, so that adapters can be merged
        into it. Default: the state as it is, right for masks by magnitude and for kept ones."""
        return view.state

    def check_state(self, view: WeightView) -> str | None:
        """What is wrong with state that this method cannot have made, None where it can have.

        Runs on what was read from a file, and before an export: `view.state` may hold any values, in the right shapes;
        `view.matrix` is on the meta device.
        """
        return None

    # What happens in training.

    def schedule(self, total_steps: int) -> Schedule:
        """When a run of so many optimizer steps is sparse. Raises ValueError for one too short for its dense phases."""
        lengths = self.settings if isinstance(self.settings, PhaseSettings) else PhaseSettings()
        return Schedule.from_lengths(total_steps, lengths.dense_start, lengths.dense_tail)

    def phase(self, step: int, total_steps: int, optimizer: torch.optim.Optimizer) -> str:
        """How the model computes once `step` optimizer steps are done. Default: what the schedule says."""
        return self.schedule(total_steps).phase(step)

    def check_run(self, total_steps: int, optimizer: torch.optim.Optimizer) -> None:
        """Raise ValueError where a run cannot work: a schedule that does not fit, an unresolved setting, an optimizer
        that is not the method's own."""
        self.schedule(total_steps)

    def make_optimizer(
        self, groups: list[dict[str, Any]], total_steps: int, **arguments: Any
    ) -> torch.optim.Optimizer | None:
        """The optimizer that the method needs, None where any will do. `groups` are those of `step_param_groups`;
        `arguments` are `lr`, `betas` and `eps` as users give them."""
        return None

    def change_gradients(self, pieces: Pieces, context: StepContext) -> None:
        """Change gradients or values elementwise, in place, right before an optimizer step, when gradients are final.

        Each `Piece` is what this process updates of one weight; frozen weights have none. With DeepSpeed ZeRO this runs
        for each parameter group apart.
        """

    def metrics(self, context: StepContext) -> dict[str, float]:
        """Numbers to log besides the flip rate and the kept magnitude."""
        return {}
