"""SparseMethod: everything that a method decides, in one class. And the registry of methods."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import sparse24_kernels as kernels
import torch
from sparse24_kernels import Pattern
from torch import Tensor

from ..weights.encodings import Forms
from ..weights.gemms import Gemms, standard_gemms
from ..weights.sparse_weight import SparseWeight, WeightView
from .schedule import Schedule
from .settings import RESERVED, GemmSettings, MethodSettings, PhaseSettings, shown

METHODS: dict[str, type["SparseMethod"]] = {}
"""The registered methods by name: those of this library, and those that `register_method` has added."""


@dataclass
class StepContext:
    """What a method's training hooks are told; made anew for every optimizer step.

    Attributes:
        step: optimizer steps done.
        total_steps: optimizer steps of the whole run.
        phase: how the model computes now.
        optimizer: the optimizer itself, never a wrapper.
        groups: the optimizer's parameter group of each trainable weight.
        packed_masks: whether `mask` gives packed bits.
    """

    step: int
    total_steps: int
    phase: str
    optimizer: torch.optim.Optimizer
    groups: Mapping[str, dict[str, Any]]
    packed_masks: bool = False
    _masks: dict[str, Tensor] = field(default_factory=dict)

    def learning_rate(self, name: str) -> float:
        """The learning rate of a weight.

        Args:
            name: of the weight, as the hook's `weights` have it.

        Returns:
            What the optimizer uses now.
        """
        return self.groups[name]["lr"]

    def mask(self, name: str, weight: SparseWeight) -> Tensor:
        """The mask of what this process updates of a weight, computed once in a step however many ask.

        Args:
            name: of the weight.
            weight: the weight.

        Returns:
            bool or packed bits, as every function of `sparse24_kernels` takes them.
        """
        if name not in self._masks:
            # On a GPU bits: an eighth of the memory. On a CPU packing costs more than it saves.
            self._masks[name] = weight.local_mask(packed=self.packed_masks or weight.master.is_cuda)
        return self._masks[name]


class SparseMethod(ABC):
    """A method of sparse training. One instance serves all weights of a model; it holds no tensors.

    To write one, subclass this, give it `Settings`, implement `mask` and `prune`, override what else it does, and
    register it:

        @register_method("my-method")
        class MyMethod(SparseMethod):
            @dataclass(frozen=True, kw_only=True)
            class Settings(PhaseSettings, GemmSettings):
                strength: float = setting(0.1, is_non_negative, "what it does (source)")

    Then `Sparse24Config(method="my-method", strength=0.2)` and everything else works as for the methods of this
    package. What computes on tensors is a pure function of a `WeightView`; nothing is decided inside forward, which
    gradient checkpointing repeats. What changes during training changes in the hooks that run between steps.

    You never make an instance: `patch_model` does, of the registered class.

    What the hooks get: `view`, a `WeightView`; `weights`, the sparse weights of the model by name, of which `master` is
    the dense Parameter, `state` the buffers of `init_state` and `parameters` the tensors of `init_parameters`;
    `context`, a `StepContext`; `step`, the optimizer steps done, and `total_steps`, those of the whole run.

    Args:
        settings: an instance of the class's `Settings`.
        pattern: N:M of the config.

    Attributes:
        settings: the settings as they are now.
        pattern: N:M of the config.
    """

    name: ClassVar[str]
    """Set by `register_method`."""

    Settings: ClassVar[type[MethodSettings]] = MethodSettings
    """The frozen dataclass of the method's settings."""

    phases: ClassVar[tuple[str, ...]] = ("sparse", "dense")
    """In `"dense"` a layer computes with its master weight, in every other phase with what the method prunes it to."""

    transposable: ClassVar[bool] = False
    """Whether the mask is N:M along the output dimension too, so that the grad_input GEMM can be sparse."""

    accepts_masks: ClassVar[bool] = False
    """Whether the state is a mask that may come from elsewhere (see `adopt_mask`)."""

    mask_is_local: ClassVar[bool] = False
    """Whether the mask of a part of a weight, in whole groups along the input dimension, follows from that part and its
    state. A weight that FSDP2 shards is gathered for its mask otherwise."""

    flips_at_refresh: ClassVar[bool] = False
    """Whether the mask changes only when state is refreshed: the flip rate is then that of the last refresh."""

    gemms: Gemms
    """What `make_gemms` says for the settings as they are."""

    def __init__(self, settings: Any, pattern: Pattern):
        self.pattern = pattern
        self.use_settings(settings)

    def use_settings(self, settings: Any) -> None:
        """Go on with other settings."""
        self.settings = settings
        self.gemms = self.make_gemms()

    # What the GEMMs multiply with.

    def make_gemms(self) -> Gemms:
        """The three GEMMs of a layer. Default: the pruned weight forward and backward, and what `GemmSettings` say."""
        names = [f.name for f in dataclasses.fields(GemmSettings)]
        chosen = {name: getattr(self.settings, name) for name in names if hasattr(self.settings, name)}
        return standard_gemms(self.pattern, transposable=self.transposable, **chosen)

    @abstractmethod
    def mask(self, view: WeightView, packed: bool) -> Tensor:
        """Which entries of `view.matrix` are kept: bool, its shape, or its packed bits. Decay and metrics ask."""

    @abstractmethod
    def prune(self, view: WeightView, operand: str, forms: Forms, dtype: torch.dtype) -> Sequence[Tensor]:
        """A weight operand of the GEMMs in the forms that they take it. Use `prune_by` with a rule of the kernels, or
        `forms_of` with a result of your own.

        Args:
            view: the weight and its state.
            operand: which weight: `"pruned"`, which must be N:M along `view.dim`, or a name that `make_gemms` gives to
                another one.
            forms: name of a form (see `sparse24_kernels.prune_forms`) to how it is compressed.
            dtype: of the result.

        Returns:
            One result per form, without -0.0.
        """

    def prune_by(
        self, view: WeightView, forms: Forms, dtype: torch.dtype, rule: str, **arguments: Any
    ) -> Sequence[Any]:
        """Prune by a rule of `sparse24_kernels.prune_forms`, in one pass.

        Args:
            view: the weight and its state.
            forms: as `prune` gets them.
            dtype: as `prune` gets it.
            rule: `"magnitude"`, `"soft-threshold"` or `"mask"`.
            arguments: of the rule: `scale=` of the soft threshold, `mask=` of the mask.

        Returns:
            What `prune` returns.
        """
        compressions = {form: compression for form, compression in forms.items() if compression is not None}
        return kernels.prune_forms(
            view.matrix,
            list(forms),
            rule,
            *self.pattern,
            view.dim,
            dtype=dtype,
            compressions=compressions,
            **arguments,
        )

    def forms_of(self, result: Tensor, forms: Forms, dtype: torch.dtype) -> Sequence[Tensor]:
        """The forms of a matrix that a method has pruned by itself.

        Args:
            result: the pruned matrix, in the layout of `view.matrix`; compressed forms leave out its zeros.
            forms: as `prune` gets them.
            dtype: as `prune` gets it.

        Returns:
            What `prune` returns.
        """
        view = WeightView(result, 1, {})
        return self.prune_by(view, forms, dtype, "mask", mask=result != 0)

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

    def init_state(self, view: WeightView) -> dict[str, Tensor]:
        """Buffers to keep beside a weight, a deterministic function of it.

        Runs when a model is patched (possibly on the meta device), after dense weights have been loaded, when sparsity
        begins after a dense start, and at refreshes.
        """
        return {}

    def init_parameters(self, view: WeightView) -> dict[str, Tensor]:
        """Trainable tensors to keep beside a weight, a deterministic function of it (never views of `view.matrix`).

        Runs when a model is patched (possibly on the meta device) and after dense weights have been loaded. The tensors
        exist from then on, so that optimizers, schedulers and checkpoints know them; they take part in training as
        early or late as `adapt_output` and `loss` use them. DDP needs `find_unused_parameters=True` until they do.
        """
        return {}

    def adopt_mask(self, view: WeightView, mask: Tensor) -> dict[str, Tensor]:
        """The state for a mask `[rows, columns]` that was chosen elsewhere, such as by `oneshot`: N of every M."""
        raise ValueError(f"method {self.name!r} chooses its own masks")

    def state_of_pruned(self, view: WeightView) -> dict[str, Tensor]:
        """The state with which `view.matrix`, which is N:M already, is pruned to itself.

        Asked for where a sparse weight takes the place of its master, so that adapters can be merged into it. Its zeros
        include those that `view.state` makes. Default: the state as it is, right for masks by magnitude and for kept
        ones.
        """
        return view.state

    def check_state(self, view: WeightView) -> str | None:
        """What is wrong with state that this method cannot have made, None where it can have.

        Runs on what was read from a file, and before an export: `view.state` may hold any values, in the right shapes;
        `view.matrix` is on the meta device.
        """
        return None

    def adapt_output(self, weight: SparseWeight, x: Tensor, output: Tensor) -> Tensor:
        """What a layer returns, given its input and the result of its GEMM. Default: that result."""
        return output

    def merged(self, weight: SparseWeight) -> Tensor:
        """The one weight that computes what the layer computes, for export and `unpatch_model`. Not asked for in the
        dense phase, whose weight is the master. Runs without gradients."""
        return weight.pruned()

    # What happens in training.

    def schedule(self, total_steps: int) -> Schedule:
        """When a run of so many optimizer steps is sparse.

        Raises:
            ValueError: the run is too short for its dense phases.
        """
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
        """The optimizer that the method needs.

        Args:
            groups: of `step_param_groups`; those of sparse weights have `"masked": True`.
            total_steps: optimizer steps of the whole run.
            arguments: `lr`, `betas` and `eps` as users give them.

        Returns:
            The optimizer, None where any will do.
        """
        return None

    def loss(self, weights: Mapping[str, SparseWeight], context: StepContext) -> Tensor | None:
        """A term of the loss that depends on weights and the method's parameters alone; None for none.

        Its gradient is added once per optimizer step, after clipping and unscaling, right before `before_step`; so it
        does not depend on accumulation, clipping or a loss scale.
        """
        return None

    def before_step(self, weights: Mapping[str, SparseWeight], context: StepContext) -> None:
        """Runs right before every optimizer step, once gradients are final.

        With FSDP2 and tensor parallelism `weight.master` and its gradient are DTensors; `sharding.local` gives the part
        of one that this process updates, and `context.mask` the mask of that part. With DeepSpeed ZeRO-1 and ZeRO-2 all
        of that is flat, and this runs for each parameter group apart, with the weights of the group.
        """
        return

    def after_step(self, weights: Mapping[str, SparseWeight], context: StepContext) -> None:
        """Runs right after every optimizer step; `context.step` counts it already."""
        return

    def refreshes_state(self, step: int, total_steps: int) -> bool:
        """Whether state is computed anew from the weights once `step` steps are done, besides where sparsity starts."""
        return False

    def metrics(self, weights: Mapping[str, SparseWeight], optimizer: torch.optim.Optimizer) -> dict[str, float]:
        """Numbers to log besides the flip rate and the kept magnitude. `optimizer` is the one of `phase`."""
        return {}


Method = TypeVar("Method", bound=type[SparseMethod])


def register_method(name: str) -> Callable[[Method], Method]:
    """Class decorator: make a `SparseMethod` known by `name`, in configs, checkpoints and on the command line.

    Loading a checkpoint of the method needs the registration too: import the module that has it first.

    Args:
        name: what `Sparse24Config(method=...)` calls it.

    Returns:
        The decorator, which returns the class itself.

    Raises:
        ValueError: a name that is taken by another class (running a notebook's cell again is fine), a class that
            lacks `mask` or `prune` or one of the phases `"sparse"` and `"dense"`, or settings that are not a frozen
            dataclass derived from `MethodSettings` with every field made by `setting(...)`.

    Examples:
        >>> @register_method("my-ste")
        ... class MySTE(METHODS["ste"]):
        ...     def refreshes_state(self, step, total_steps):
        ...         return step % 10 == 0
        >>> Sparse24Config(method="my-ste").method
        'my-ste'
    """

    def register(cls: Method) -> Method:
        if not isinstance(name, str) or not name:
            raise ValueError(f"register_method({name!r}): must be a name")
        taken = METHODS.get(name)
        if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"method {name!r} is registered already, by {taken.__module__}.{taken.__qualname__}")
        _check_class(cls)
        cls.name = name
        METHODS[name] = cls
        return cls

    return register


def _check_class(cls: type[SparseMethod]) -> None:
    if cls.__abstractmethods__:
        raise ValueError(f"{cls.__name__} must implement {sorted(cls.__abstractmethods__)}")
    if not {"sparse", "dense"} <= set(cls.phases):
        raise ValueError(f"{cls.__name__}.phases={cls.phases!r}: must have 'sparse' and 'dense' among them")
    settings: Any = cls.Settings
    parameters = vars(settings).get("__dataclass_params__")  # of this class, not inherited
    if not issubclass(settings, MethodSettings) or parameters is None or not parameters.frozen:
        raise ValueError(
            f"{cls.__name__}.Settings must be a class derived from MethodSettings, below "
            f"@dataclass(frozen=True, kw_only=True)"
        )
    for found in dataclasses.fields(settings):
        if "check" not in found.metadata:
            raise ValueError(f"{cls.__name__}.Settings.{found.name}: make it by setting(default, check, text)")
        if found.name in RESERVED:
            raise ValueError(f"{cls.__name__}.Settings.{found.name}: a config has a field of that name already")


def method_class(name: Any) -> type[SparseMethod]:
    """The method registered by `name`.

    Raises:
        ValueError: none is; with the names that are.
    """
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(
            f"method={shown(name)}: must be one of {sorted(METHODS)}; import the module of a method of your own first, "
            f"so that register_method makes it known"
        )
    return METHODS[name]
