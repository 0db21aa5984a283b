"""SparseRun: one object per patched model, with all that changes while it trains."""

import dataclasses
from typing import Any
from weakref import WeakSet

from sparse24_kernels import Pattern
from torch import nn

from .config import SavedConfig, Sparse24Config, fixed_differences
from .facts import RunFacts, check_phase
from .methods import SparseMethod, method_class
from .methods.base import DENSE_PHASE
from .methods.settings import SHARED
from .progress import get_logger
from .tables import shown
from .weights.encodings import RUNS
from .weights.sparse_weight import sparse_weights

logger = get_logger(__name__)


def wants_packed_master(config: Sparse24Config) -> bool:
    """Whether a config says `master="packed"`."""
    return getattr(config, "master", "dense") == "packed"


class SparseRun:
    """The state of a patched model that changes while it trains, shared by its weights. `sparse_run(model)` finds it.

    Attributes:
        saved: the `quantization_config` of the model; only the run replaces its config and facts.
        method: the method, with the settings as they are now.
        controller: the `Sparse24Controller` that trains the model, None where nothing does.
        open_step: token of the current step. Cached encodings are valid while it is the same; None between steps.
        key: unique among the runs of this process.
        owners: the models whose configs say that they, or parts of them, are sparse.
    """

    def __init__(self, config: Sparse24Config | SavedConfig):
        self.saved = config if isinstance(config, SavedConfig) else SavedConfig(config)
        self.method = _make_method(self.config)
        self._others: dict[Pattern, SparseMethod] = {}
        self.controller: Any = None
        self.open_step: object | None = None
        self.owners: WeakSet[nn.Module] = WeakSet()
        self.key = f"run {id(self)}"
        RUNS[self.key] = self
        self._said: set[str] = set()

    @property
    def config(self) -> Sparse24Config:
        """How the model is patched, with the settings as they are now."""
        return self.saved.config

    @property
    def facts(self) -> RunFacts:
        """The facts that the run has learned, as `config.json` has them."""
        return self.saved.facts

    @property
    def phase(self) -> str:
        """How the model computes: `"sparse"`, `"dense"`, or another phase of its method."""
        return self.facts.phase

    @property
    def is_dense(self) -> bool:
        """Whether the model computes with its dense master weights."""
        return self.phase == DENSE_PHASE

    @property
    def backend(self) -> str:
        """The backend of the GEMMs, as `Sparse24Config.backend` names it; `"dense"` in the dense phase."""
        return "dense" if self.is_dense else self.config.backend

    @property
    def progress(self) -> tuple[int, int]:
        """Optimizer steps done, and those of the whole run; (0, 1) outside training."""
        return (0, 1) if self.controller is None else (self.controller.step, self.controller.total_steps)

    def record(self, **facts: Any) -> None:
        """Replace fields of the facts, unchecked."""
        self.saved.facts = dataclasses.replace(self.facts, **facts)

    def change_config(self, **fields: Any) -> None:
        """Change fields of the config that no state depends on, such as `backend`; checked as in a new config."""
        self.saved.config = self.config.replace(**fields)

    def change_settings(self, **settings: Any) -> None:
        """Go on with other settings of the method, such as `masked_decay`, from the next step on.

        Args:
            settings: by name, checked as in a new config.

        Raises:
            ValueError: a value that is not allowed, or a field that is no setting of the method.
        """
        fixed = ", ".join(f"{name}={shown(value)}" for name, value in settings.items() if name in SHARED)
        changed = self.config if fixed else self.config.replace(**settings)
        if wrong := fixed or fixed_differences(self.config, changed):
            way = "call unpatch_model(model, sparse=False), then patch_model with another config"
            raise ValueError(f"{wrong}: fixed while the model is patched; {way}")
        self.saved.config, self.method, self._others = changed, _make_method(changed), {}

    def method_of(self, pattern: Pattern) -> SparseMethod:
        """The method with the pattern of a layer; with the model's own it is `method`."""
        if pattern == self.method.pattern:
            return self.method
        if pattern not in self._others:
            self._others[pattern] = type(self.method)(self.method.settings, pattern)
        return self._others[pattern]

    def expect_controller(self) -> None:
        """Say once that a model trains and nothing runs its sparsity."""
        if self.controller is None:
            self.warn_once(
                "this sparse model trains without a Sparse24Controller: phases, masks and scales stay as they are, and "
                "there is no masked decay. In a Trainer, call Sparse24Callback.add_to(trainer) before train(); in a "
                "loop of your own, make a Sparse24Controller(model, optimizer, total_steps)"
            )

    def warn_once(self, text: str) -> None:
        """Log a warning, where it has not been logged for this model."""
        if text not in self._said:
            self._said.add(text)
            logger.warning(text)

    def __reduce__(self) -> Any:
        return SparseRun, (self.saved,)  # a copy has no controller and no owners


def _make_method(config: Sparse24Config) -> SparseMethod:
    return method_class(config.method)(config.settings, Pattern.parse(config.pattern))


def sparse_run(model: nn.Module) -> SparseRun | None:
    """Return the run of a patched model.

    Args:
        model: any model.

    Returns:
        What its weights share; None of a model that is not patched, or is packed for good.
    """
    weights = (weight for module in model.modules() for weight in module.__dict__.get("sparse24", {}).values())
    return next((weight.run for weight in weights if weight.run is not None), None)  # packed ones may have none


def patched_config(model: nn.Module) -> Sparse24Config | None:
    """The config that a model is patched with, its own; None of a model that is not patched."""
    run = sparse_run(model)
    return None if run is None else run.config


def set_phase(model: nn.Module, phase: str) -> None:
    """Let a model compute in another phase of its method; in training the controller sets phases.

    A model whose run has ended dense, or with SLoPe's adapters (`facts.finished`), stays so in further training.
    `set_phase(model, "sparse")` before that makes it follow the schedule again; where the run ended dense, with
    masks and scales of its weights as they are now. Otherwise masks and scales stay as they are: for dense training
    before sparse training take `dense_start`.

    Args:
        model: a patched model, whole. One without a run, such as a dense model, stays as it is.
        phase: `"sparse"`, `"dense"`, or another phase of the method.

    Raises:
        ValueError: no phase of the method, or a dense one of weights whose zeros are not stored.
    """
    run = sparse_run(model)
    if run is None or run.phase == phase:
        return
    check_phase(phase, run.method.phases)
    if run.facts.packed is not None and phase != "sparse":
        raise ValueError(f"phase={phase!r}: the model has no dense masters (config.master), so only 'sparse'")
    starts_again = run.facts.finished and run.is_dense
    run.record(phase=phase, finished=False)
    for weight in sparse_weights(model).values():
        weight.encodings.clear(graphs=True)  # the dense phase needs none
        if starts_again:
            weight.init_state()
