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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sparse24_kernels import Pattern
from torch import Tensor
from torch.optim import Optimizer

from ..weights.gemms import Gemms, standard_gemms
from ..weights.rules import Mask, Rule, mask_of
from ..weights.sparse_weight import SparseWeight
from ..weights.storage import WeightView
from .settings import MethodSettings, PhaseSettings, StandardSettings, sparse_steps

DENSE_PHASE = "dense"
"""The phase in which a model computes with its master weights."""


@dataclass(frozen=True)
class StepContext:
    """Where training stands.

    Attributes:
        step: optimizer steps done.
        total_steps: optimizer steps of the whole run.
        phase: how the model computes now.
        optimizer: the optimizer itself, never a wrapper.
        weights: the sparse weights by name: `.parameters` are the tensors of `init_parameters`, `.state` the buffers of
            `init_state`. With FSDP2 and tensor parallelism both may be DTensors; `whole` gathers one.
    """

    step: int
    total_steps: int
    phase: str
    optimizer: Optimizer
    weights: Mapping[str, SparseWeight] = field(repr=False)


@dataclass(frozen=True)
class Piece:
    """The part of a weight that this process updates: all of it, its rows by FSDP2, or its share of a
    flat group of DeepSpeed ZeRO. All tensors have one shape.

    Attributes:
        name: of the weight.
        values: of the dense master weight. May be changed in place.
        gradient: clipped and unscaled, as the optimizer will use it. Changed in place.
        learning_rate: what the optimizer uses now.
    """

    name: str
    values: Tensor
    gradient: Tensor
    learning_rate: float
    make_mask: Callable[[], Tensor] = field(repr=False)

    @property
    def mask(self) -> Tensor:
        """Which entries the method keeps: bool, or packed bits as every function of `sparse24_kernels` takes them."""
        return self.make_mask()


class SparseMethod:
    """A method of sparse training. One instance serves all weights of a model; it holds no tensors.

    To write one, implement `mask`, or `prune` where the weight is more than masked, and register the class:

        @register_method("my-method")
        class MyMethod(SparseMethod):
            def mask(self, view):
                return nm_mask(view.matrix, *self.pattern, view.dim)

    Everything else has a default. What computes on a `WeightView` is a pure function of it: it runs again when weights
    are loaded, and gradient checkpointing repeats the forward pass. Change things in the hooks that run between steps.
    `step` is the number of optimizer steps done, `total_steps` that of the whole run. `patch_model` makes the instance.

    Args:
        settings: an instance of the class's `Settings`.
        pattern: N:M of the config.

    Attributes:
        name: set by `register_method`.
        Settings: the frozen dataclass of the method's settings.
        gemms: the three GEMMs of a layer, by the settings.
        phases: in `"dense"` a layer computes with its master weight, in every other with what `prune` makes of it.
        transposable: whether the weight of the grad_input GEMM is N:M along the output dimension, so that this GEMM can
            be sparse.
        mask_is_local: whether the mask of some whole groups of a weight follows from their values and state. Otherwise
            FSDP2 gathers a sharded weight for its mask.
        flips_at_refresh: whether masks change only when state is refreshed: the flip rate is then that of the last one.
        settings_of_state: settings that `init_state` uses, so that they cannot change later.
        keeps_zeros: whether dropped weights stay zero while the model trains: without a gradient, and left at zero by
            optimizer steps. Otherwise the gradient goes straight through to the dense master.
    """

    name: ClassVar[str]
    Settings: ClassVar[type[MethodSettings]] = StandardSettings
    phases: ClassVar[tuple[str, ...]] = ("sparse", DENSE_PHASE)
    transposable: ClassVar[bool] = False
    mask_is_local: ClassVar[bool] = False
    flips_at_refresh: ClassVar[bool] = False
    settings_of_state: ClassVar[tuple[str, ...]] = ()
    keeps_zeros: ClassVar[bool] = False

    def __init__(self, settings: Any, pattern: Pattern):
        self.settings, self.pattern = settings, pattern
        self.gemms: Gemms = standard_gemms(pattern, settings, self.transposable, self.overrides("prune_grad_input"))

    @classmethod
    def overrides(cls, *hooks: str) -> bool:
        """Whether the class overrides one of these hooks; the library skips the work of a default."""
        return any(getattr(cls, hook) is not getattr(SparseMethod, hook) for hook in hooks)

    def mask(self, view: WeightView) -> Tensor:
        """Which entries of `view.matrix` are kept: bool, its shape, at most N of every M along `view.dim`."""
        return mask_of(self.prune(view), view, self.pattern, packed=False)

    def prune(self, view: WeightView) -> Rule:
        """How the weight becomes N:M along `view.dim`: `Magnitude()`, `SoftThreshold(scale)`, `Mask(mask)` or
        `Values(tensor)`. Default: `mask`."""
        return Mask(self.mask(view))

    def prune_grad_input(self, view: WeightView) -> Rule:
        """The same for the weight of the grad_input GEMM, which contracts `1 - view.dim`: N:M along that dimension with
        `transposable`. Default: the weight of `prune`."""
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

    def init_state(self, view: WeightView, step: int, total_steps: int) -> dict[str, Tensor]:
        """Buffers to keep with a weight: a deterministic function of it and of the step; (0, 1) outside training.
        The weight may be on the meta device."""
        return {}

    def refreshes_state(self, step: int, total_steps: int) -> bool:
        """Whether `init_state` runs again once `step` steps are done. It always runs where sparsity starts."""
        return False

    def init_parameters(self, view: WeightView) -> dict[str, Tensor]:
        """Trainable tensors to keep with a weight: a deterministic function of it, never views of `view.matrix`. The
        weight may be on the meta device. DDP needs `find_unused_parameters=True` until `adapt_output` uses them."""
        return {}

    def adapt_output(self, x: Tensor, output: Tensor, parameters: dict[str, Tensor], phase: str) -> Tensor:
        """The output of a layer in `phase`, from its input, the result of its GEMM, and its own `parameters`."""
        return output

    def merge(self, pruned: Tensor, parameters: dict[str, Tensor], phase: str) -> Tensor:
        """The one weight `[out, in]` that computes what the layer does with `pruned` and `adapt_output`."""
        return pruned

    def adopt_mask(self, view: WeightView, mask: Tensor) -> dict[str, Tensor]:
        """The state for a mask `[rows, columns]` that was chosen elsewhere, such as by `oneshot`: N of every M."""
        raise ValueError(f"method {self.name!r} chooses its own masks")

    def state_of_pruned(self, view: WeightView) -> dict[str, Tensor]:
        """The state with which `view.matrix`, which is N:M already, is pruned to itself. Default: the state as it is,
        right for masks by magnitude and for kept ones."""
        return view.state

    def check_state(self, view: WeightView) -> str | None:
        """The fault of state that this method cannot have made; None for right state. `view.state` may hold any
        values, in the right shapes; `view.matrix` is on the meta device."""
        return None

    def schedule(self, total_steps: int) -> range:
        """The steps of a run that are sparse; ValueError for a run too short for its dense phases."""
        lengths = self.settings if isinstance(self.settings, PhaseSettings) else PhaseSettings()
        return sparse_steps(total_steps, lengths.dense_start, lengths.dense_tail)

    def phase(self, step: int, total_steps: int, optimizer: Optimizer) -> str:
        """How the model computes once `step` optimizer steps are done. Default: what the schedule says."""
        return "sparse" if step in self.schedule(total_steps) else DENSE_PHASE

    def check_run(self, total_steps: int, optimizer: Optimizer) -> None:
        """Raise ValueError for a run that cannot work: too few steps, an unresolved setting, another optimizer."""
        self.schedule(total_steps)

    def make_optimizer(self, groups: list[dict[str, Any]], total_steps: int, **arguments: Any) -> Optimizer | None:
        """The optimizer that the method needs, None for any. `groups` are those of `step_param_groups`; `arguments` are
        `lr`, `betas` and `eps` as users give them."""
        return None

    def change_gradients(self, pieces: list[Piece], context: StepContext) -> None:
        """Change gradients or values elementwise, in place, right before an optimizer step, when gradients are final.
        Frozen weights have no `Piece`. With DeepSpeed ZeRO this runs for each parameter group apart."""

    def metrics(self, context: StepContext) -> dict[str, float]:
        """Numbers to log besides the flip rate and the kept magnitude."""
        return {}
