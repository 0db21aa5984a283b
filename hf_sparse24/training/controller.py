"""Sparse24Controller: everything that happens between steps, without any Trainer.

Forward decides nothing, since gradient checkpointing and accumulation repeat it. The controller changes phases, state
such as masks, gradients, and the random streams of MVUE, as the method says.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..extensions import adapters_in, extensions
from ..methods import StepContext
from ..methods.base import DENSE_PHASE
from ..patching.ownership import adopt, unwrap
from ..patching.report import FINISHED
from ..progress import get_logger
from ..run import SparseRun, set_phase
from ..weights.sharding import rank
from ..weights.sparse_weight import sparse_weights
from ..weights.storage import TRAINED
from .checks import check_ranks_agree
from .optimizers import check_optimizer, followed, warn_of_steps
from .step_masks import RandomStreams, StepMasks, kept_magnitude
from .zero import ZeroOptimizer

logger = get_logger(__name__)

State = dict[str, Any]
"""Plain numbers and names by name, as `Sparse24Controller.state_dict` gives them."""


class Sparse24Controller:
    """Runs a patched model's sparsity in a training loop of your own.

    It follows the optimizer. Right before each step, when gradients are final, the method changes them; right after,
    the controller counts the step, switches the phase and refreshes state. A call of `optimizer.step()` that takes no
    step, as while accelerate accumulates gradients, does not count.

    Pruned weights are kept from one step to the next, for all micro-batches in between. Code that writes weights there
    through `.data` must call `weight.clear_encodings()` on `hf_sparse24.sparse_weights(model).values()`.

    To resume, load the `state_dict` of the model, the optimizer and the controller, in this order. Each process makes
    its own controller.

    Args:
        model: a patched model, plain or wrapped by DDP, `fully_shard` (FSDP2), DeepSpeed ZeRO-1 or ZeRO-2, or tensor
            parallelism of Transformers. Patch first, then wrap, then make the optimizer.
        optimizer: the optimizer of its trainable parameters; with DeepSpeed that of its engine, `engine.optimizer`.
        total_steps: optimizer steps of the whole run, finished ones included.
        seed: of MVUE's random streams, >= 0, the same on all processes: they draw independently of each other.
        step: optimizer steps already done, when resuming.
        metrics_interval: the flip rate is measured at step 1 and at multiples of this, by masks of before the step, and
            of after it where the rate is read.

    Raises:
        ValueError: the model, its optimizer or its engine cannot train as it is, or a number is out of its range.

    Attributes:
        model: the model, out of what was put around it.
        run: the model's run.
        optimizer: the optimizer that is followed, never a wrapper.
        weights: the sparse weights by name; none without dense masters, where the kept values train as any Parameter.
        step, micro_step: optimizer steps done, and micro-batches since.

    Examples:
        >>> from transformers import AutoConfig, AutoModelForCausalLM
        >>> model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("gpt2"))
        >>> _ = patch_model(model)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        >>> controller = Sparse24Controller(model, optimizer, total_steps=2)
        >>> for step in range(2):
        ...     ids = torch.randint(300, (1, 16))
        ...     model(input_ids=ids, labels=ids).loss.backward()
        ...     optimizer.step()  # the controller acts right before and right after
        ...     optimizer.zero_grad()
        >>> controller.step
        2
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        *,
        seed: int = 0,
        step: int = 0,
        metrics_interval: int = 1,
    ):
        numbers = {"total_steps": total_steps, "step": step, "seed": seed, "metrics_interval": metrics_interval}
        _check_ints(1, total_steps=total_steps, metrics_interval=metrics_interval)
        _check_ints(0, total_steps, step=step)
        _check_ints(0, seed=seed)
        self.model, self.run = _prepared(model)
        self.weights, self._followed = sparse_weights(self.model), followed(optimizer, self.run.method)
        self.optimizer = self._followed.optimizer
        self.total_steps, self.seed, self.metrics_interval = total_steps, seed, metrics_interval
        self.step, self.micro_step, self._is_new = step, 0, True
        # Without a dense master a weight trains as any Parameter: nothing is done to it, and its mask never flips.
        self._trained = masters = sparse_weights(self.model, TRAINED)
        check_optimizer(masters, self.optimizer)
        self._masks = StepMasks(self.model, self.run, self.weights)
        if not self.keeps_phase:
            self.run.method.check_run(total_steps, self.optimizer)
        if self.run.controller is not None:
            self.run.controller.end()
        self._streams = RandomStreams(list(self.weights.values()))
        self._hooks: Sequence[RemovableHandle | ZeroOptimizer] = ()
        self.run.controller = self
        self._masks.enter_phase(self.phase)
        try:
            check_ranks_agree(masters, self.run.saved.to_dict() | numbers)
        except ValueError:
            self.end()
            raise
        self._streams.set(self.seed, rank(), self.step, self.micro_step)
        self.run.open_step = object()
        self._hooks = self._followed.follow(self._before_step, self._change_gradients, self._after_step)

    @property
    def is_running(self) -> bool:
        """Whether it follows the optimizer: it has not ended, and no other controller has taken the model over."""
        return self.run.controller is self

    @property
    def phase(self) -> str:
        """How the model computes in the next step: `"sparse"`, `"dense"`, or another phase of the method. It stays
        where all sparse weights are frozen, or some below adapters, and after a run that has finished."""
        run = self.run
        return run.phase if self.keeps_phase else run.method.phase(self.step, self.total_steps, self.optimizer)

    def end(self) -> None:
        """Stop following the optimizer. Call it where training stops before `total_steps`."""
        for hook in self._hooks:
            hook.remove()
        if self.is_running:
            self.run.open_step = self.run.controller = None
            self._streams.end()
            for weight in self.weights.values():
                weight.encodings.clear(graphs=True)

    def after_micro_step(self) -> None:
        """Call after the backward pass of each micro-batch but a step's last: the next draws other MVUE samples."""
        self.micro_step += 1
        self._streams.set(self.seed, rank(), self.step, self.micro_step)

    def skip_step(self) -> None:
        """Count a step that the optimizer did not take, for a loop that counts such steps."""
        self._after_step()

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """Return what to log now.

        Returns:
            Numbers by name. `sparse_phase` is 1.0 while sparse, else 0.0; `kept_magnitude` the share of the sparse
            weights' L1 norm that the masks keep; `flip_rate` the share of sparse weights that entered or left the mask
            in the last measured step or refresh. The method may add others; without dense masters there is
            `sparse_phase` alone. With sharded weights, all processes must call this.
        """
        values = {"sparse_phase": float(self.phase != "dense")}
        if self.weights:
            values["kept_magnitude"] = kept_magnitude(self.weights)
        if self._masks.flips:
            values["flip_rate"] = self._masks.flip_rate()
        has_none = self._masks.is_frozen or (self.run.facts.finished and self.run.is_dense)
        return values if has_none else values | self.run.method.metrics(self._context())

    def layer_flip_rates(self) -> dict[str, float]:
        """Return the flip rate of each layer, as last measured.

        Returns:
            Rates by layer name, empty before the first measurement. A shared weight stands under its first layer.
        """
        return self._masks.flip_rates()

    def state_dict(self) -> State:
        """Return what the controller needs to go on.

        Returns:
            Plain numbers by name, `flips` by name of the weight. Masks and scales are in the model's `state_dict`.
        """
        return {
            "method": self.run.method.name,
            "step": self.step,
            "micro_step": self.micro_step,
            "seed": self.seed,
            "finished": self.run.facts.finished,
            "phase": self.run.phase,
            "flips": {name: int(count) for name, count in self._masks.flips.items()},
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from what `state_dict()` gave; load those of the model and of the optimizer first.

        Args:
            state: what `state_dict` returned.

        Raises:
            ValueError: not what `state_dict` gives, or of another method, model or longer run, or the method's own
                optimizer has no state. Nothing is changed then.
        """
        _check_state(state, self)
        self.step, self.micro_step, self.seed = state["step"], state["micro_step"], state["seed"]
        self._masks.flips = {name: torch.tensor(count, device="cpu") for name, count in state["flips"].items()}
        self.run.record(finished=False)
        set_phase(self.model, state["phase"] if state["finished"] else self.phase)
        self.run.record(finished=bool(state["finished"]))
        self._streams.set(self.seed, rank(), self.step, self.micro_step)

    @property
    def keeps_phase(self) -> bool:
        """Whether the method's schedule does not apply."""
        return self._masks.is_frozen or self.run.facts.finished

    def _before_step(self) -> None:
        """Right before the optimizer uses the gradients."""
        _check_step(self)
        self.run.open_step = None
        self._masks.start_step(measures_flips=(self.step + 1) % self.metrics_interval == 0 or self.step == 0)

    @torch.no_grad()
    def _change_gradients(self) -> None:
        """When the gradients of a step, or with ZeRO of a group, are final."""
        if self.run.method.overrides("change_gradients"):
            self.run.method.change_gradients(self._followed.pieces(self.weights, self._masks.mask), self._context())

    @torch.no_grad()
    def _after_step(self) -> None:
        """Right after an optimizer step: counts it, switches the phase, refreshes state."""
        self.step, self.micro_step = self.step + 1, 0
        keeps_state = self._masks.enter_phase(self.phase) or self.run.is_dense
        if self.step == self.total_steps and not self.keeps_phase:
            # Not where sparsity never began: STEP's switch waits while a GradScaler skips steps.
            method, first = self.run.method, self.run.method.schedule(self.total_steps).start
            has_been_sparse = method.phase(first, self.total_steps, self.optimizer) != DENSE_PHASE
            self.run.record(finished=self.run.phase != "sparse" and has_been_sparse)
        self._masks.finish_step(not keeps_state and self.run.method.refreshes_state(self.step, self.total_steps))
        self._streams.set(self.seed, rank(), self.step, self.micro_step)
        self.run.open_step = object() if self.step < self.total_steps else None
        for weight in self.weights.values():
            weight.clear_encodings()

    def _context(self) -> StepContext:
        return StepContext(self.step, self.total_steps, self.phase, self.optimizer, self.weights)


def _prepared(model: nn.Module) -> tuple[nn.Module, SparseRun]:
    """The model out of what was put around it, and its run. Its adapters and configs then know that it is sparse."""
    model = unwrap(model)
    extensions.check_adapters(model)
    if any(weight.storage.is_split for weight in sparse_weights(model).values()) and adapters_in(model):
        raise ValueError("tensor parallelism splits weights below adapters: use FSDP2 or DDP with adapters")
    run = adopt(model)
    if run is None:
        raise ValueError("the model is not patched; call patch_model(model) first")
    if run.facts.finished:
        logger.warning(FINISHED)
    return model, run


def _check_step(controller: Sparse24Controller) -> None:
    """Raise RuntimeError where a step cannot be taken: the run is over, or a weight has left the model."""
    if controller._is_new:  # not before: states are loaded into a new one
        warn_of_steps(controller.optimizer, controller.step)
        controller._is_new = False
    if controller.step >= controller.total_steps:
        way = "give the controller the steps of the whole run, or call its end()"
        raise RuntimeError(f"total_steps={controller.total_steps} are done: {way}")
    present = {id(weight) for weight in sparse_weights(controller.model, TRAINED).values()}
    gone = next((name for name, weight in controller._trained.items() if id(weight) not in present), None)
    if gone is not None:
        way = f"after that, make the optimizer and a Sparse24Controller with step={controller.step}, or call its end()"
        raise RuntimeError(f"{gone} is no sparse weight of the model any more, which was replaced or removed: {way}")


def _check_state(state: State, controller: Sparse24Controller) -> None:
    """Raise ValueError where a controller cannot go on from `state`."""
    if not controller.state_dict().keys() <= state.keys() or not state["flips"].keys() <= controller.weights.keys():
        raise ValueError(f"state={state!r}: load what the controller.state_dict() of such a model gave")
    method = controller.run.method.name
    if state["method"] != method:
        way = "patch it with the first, or start a new run from its weights"
        raise ValueError(f"the state is of method {state['method']!r}, the model is patched with {method!r}: {way}")
    _check_ints(0, controller.total_steps, step=state["step"])
    has_own = controller.run.method.overrides("make_optimizer") and not controller.keeps_phase
    if has_own and state["step"] and not controller.optimizer.state:
        way = "trains by the state of the optimizer that it makes; load that first (save_only_model=True saves none)"
        raise ValueError(f"cannot go on at step {state['step']}: method {method!r} {way}")


def _check_ints(low: int, high: int | None = None, **values: object) -> None:
    for name, value in values.items():
        if type(value) is not int or value < low or (high is not None and value > high):
            allowed = f">= {low}" if high is None else f"in {low}..{high}"
            raise ValueError(f"{name}={value!r}: must be an int {allowed}")
