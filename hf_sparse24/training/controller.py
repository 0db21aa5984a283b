"""Sparse24Controller: everything that happens between steps, without any Trainer.

`step_work.py` says what happens around a step; this file is what users call.
"""

from typing import Any

import torch
from torch import nn

from ..adapters import check_adapters
from ..adapters.attaching import attach_adapters
from ..adapters.merging import adapters_in
from ..methods.context import DENSE_PHASE
from ..patching.ownership import adopt, unwrap
from ..patching.report import FINISHED
from ..patching.surgery import set_phase
from ..progress import get_logger
from ..weights.sparse_weight import sparse_weights
from ..weights.storage import TRAINED
from .mask_metrics import kept_magnitude
from .optimizers import check_optimizer, followed, warn_of_lost_updates
from .ranks import check_ranks_agree
from .step_work import StepWork

logger = get_logger(__name__)


class Sparse24Controller(StepWork):
    """Runs a patched model's sparsity in a training loop of your own.

    It follows the optimizer: right before each of its steps, when gradients are final, the method changes them; right
    after, it counts the step, switches the phase and refreshes state. A call of `optimizer.step()` that takes no step,
    as accelerate skips it while gradients accumulate, or a GradScaler when they overflow, does not count.

    Pruned weights are kept from one step to the next, for all micro-batches in between. Code that writes weights there
    through `.data` must call `weight.clear_encodings()` on `hf_sparse24.sparse_weights(model).values()`.

    To resume, make everything as at the start, then load the `state_dict` of the model, of the optimizer, and of the
    controller, in this order. A new controller takes a model over from its earlier one.

    With several processes, each makes its own, at the same place of the program: they compare what they start with, and
    take the same steps. Masks, scales and phases are the same on all of them; gradients get their masked decay on the
    part of a weight that a process updates.

    Args:
        model: a patched model, plain or wrapped by DDP, `fully_shard` (FSDP2), DeepSpeed ZeRO-1 or ZeRO-2, or tensor
            parallelism of Transformers. Patch first, then wrap, then make the optimizer.
        optimizer: the optimizer of its trainable parameters; with DeepSpeed that of its engine, `engine.optimizer`.
        total_steps: optimizer steps of the whole run, finished ones included.
        seed: of MVUE's random streams, >= 0, the same on all processes: they draw independently of each other.
        step: optimizer steps already done, when resuming.
        metrics_interval: the flip rate is measured at steps 1 and every multiple of this; measuring costs two mask
            computations.

    Raises:
        ValueError: the model is not patched, the schedule does not fit `total_steps`, a trainable sparse weight is
            not in the optimizer, the method needs another optimizer or a setting that is still `"auto"`, or does what
            has no place in DeepSpeed, a weight is split by FSDP1, DeepSpeed ZeRO-3, or FSDP2 and tensor parallelism at
            once, processes differ in what they start with, or a number is out of its range.

    Attributes:
        model: the model, out of what was put around it.
        optimizer: the optimizer that is followed, never a wrapper.
        weights: the sparse weights by name; empty where they are packed masters, to which nothing is to be done.
        total_steps: optimizer steps of the whole run.
        step: optimizer steps done.
        micro_step: micro-batches done since.

    Examples:
        >>> from transformers import AutoModelForCausalLM
        >>> model = AutoModelForCausalLM.from_pretrained("gpt2")
        >>> _ = patch_model(model)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        >>> controller = Sparse24Controller(model, optimizer, total_steps=2)
        >>> for step in range(2):
        ...     for micro_batch in range(2):
        ...         ids = torch.randint(300, (1, 16))
        ...         model(input_ids=ids, labels=ids).loss.backward()
        ...         controller.after_micro_step()
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
        _check_ints(1, total_steps=total_steps, metrics_interval=metrics_interval)
        _check_ints(0, total_steps, step=step)
        _check_ints(0, seed=seed)
        _check_buffers(model)
        model = unwrap(model)
        self.weights = sparse_weights(model)
        attach_adapters(model)  # those that PEFT has not found by its registry
        check_adapters(model)
        if any(weight.storage.is_split for weight in self.weights.values()) and adapters_in(model):
            raise ValueError(
                "adapters around weights that tensor parallelism splits are not supported; use FSDP2 or DDP with them"
            )
        run = adopt(model)
        if run is None:
            raise ValueError("the model is not patched; call patch_model(model) first")
        if run.facts.finished:
            logger.info(FINISHED)
        self.optimizer = followed(optimizer, run.method)
        # Packed masters train as ordinary Parameters: nothing is done to them, and their masks never flip.
        masters = sparse_weights(model, TRAINED)
        check_optimizer(masters, self.optimizer)
        warn_of_lost_updates(masters, self.optimizer)
        super().__init__(model, run, self.weights, self.optimizer, total_steps, seed, step, metrics_interval)
        if step and self._has_own_optimizer and not self.optimizer.state:
            logger.warning(f"step={step}: the optimizer of method {run.method.name!r} has no state; load that first")
        numbers = {"total_steps": total_steps, "step": step, "seed": seed, "metrics_interval": metrics_interval}
        try:
            check_ranks_agree(masters, run.saved.to_dict() | numbers)
        except ValueError:
            self.end()
            raise
        self.follow()

    def after_micro_step(self) -> None:
        """Call after the backward pass of each micro-batch, so that the next one draws other MVUE samples.

        The call after an optimizer step's last micro-batch may be left out: the next step starts afresh.
        """
        self.micro_step += 1
        self._set_streams()

    def skip_step(self) -> None:
        """Count a step that the optimizer did not take, where whoever counts the run's steps counts such steps."""
        self._after_step()

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """What to log now.

        Returns:
            `sparse_phase` is 1.0 while sparse, 0.0 while dense. `kept_magnitude` is the share of the sparse weights' L1
            norm that the masks keep. `flip_rate` is the share of sparse weights that entered or left the mask in the
            last measured step, or, where masks change at refreshes alone, in the last refresh; it is absent before the
            first. And what the method adds. Packed masters have `sparse_phase` alone. Where weights are sharded, all
            processes must call this.
        """
        values = {"sparse_phase": float(not self._context().is_dense)}
        if self.weights:
            values["kept_magnitude"] = kept_magnitude(self.weights)
        rate = self._flips.rate()
        if rate is not None:
            values["flip_rate"] = rate
        if self._keeps_phase:  # the method's schedule does not apply, as below adapters
            return values
        return values | self.run.method.metrics(self._context())

    def layer_flip_rates(self) -> dict[str, float]:
        """`flip_rate` by layer, as last measured; a weight that layers share stands under the first of them.

        Returns:
            Name of the layer to share of its weights that entered or left the mask. Empty before the first measurement.
        """
        return self._flips.layer_rates()

    def state_dict(self) -> dict[str, Any]:
        """What the controller needs to go on, as plain numbers. Masks and scales are in the model's `state_dict`.

        Returns:
            `method`, `step`, `micro_step`, `seed`, `finished` (whether the model had ended dense in an earlier run, or
            has now), and `flips`, a dict by name of the weight. Where an optimizer of the
            method's own has no state after these steps, `uses_optimizer_state` is False.
        """
        flips = {name: int(count) for name, count in self._flips.counts.items()}
        numbers = {"step": self.step, "micro_step": self.micro_step, "seed": self.seed}
        numbers["finished"] = self.run.facts.finished
        is_stateless = self._has_own_optimizer and self.step and not self.optimizer.state
        marks = {"uses_optimizer_state": False} if is_stateless else {}
        return {"method": self.run.method.name, **numbers, "flips": flips, **marks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`; load those of the model and of the optimizer first.

        Args:
            state: what `state_dict()` gave.

        Raises:
            ValueError: not what `state_dict` gives, or of another method, another model or a longer run, or the state
                of the method's own optimizer is not loaded. Nothing is changed then.
        """
        defaults: dict[str, Any] = {"flips": {}, "method": self.run.method.name}  # which 0.1 did not save
        defaults["finished"] = self.run.facts.finished
        state = defaults | {"uses_optimizer_state": True} | state
        _check_state(state, self)
        self.step, self.micro_step, self.seed = state["step"], state["micro_step"], state["seed"]
        self._flips.counts = {name: torch.tensor(count) for name, count in state["flips"].items()}
        self.run.record(finished=False)
        set_phase(self.model, DENSE_PHASE if state["finished"] else self.phase)
        self.run.record(finished=bool(state["finished"]))
        self._set_streams()


def _check_buffers(model: Any) -> None:
    if getattr(model, "broadcast_buffers", False):
        logger.warning(
            "DDP copies masks and scales to all processes in every forward pass, so that weights are pruned anew for "
            "each micro-batch; they are the same anyway: pass broadcast_buffers=False (from torch 2.13 on "
            "forward_sync_buffers=False), or ddp_broadcast_buffers=False to a Trainer"
        )


def _check_state(state: dict[str, Any], controller: Sparse24Controller) -> None:
    """Raise ValueError where a controller cannot go on from `state`."""
    missing = sorted(set(controller.state_dict()) - set(state))
    if missing:
        raise ValueError(f"state={state!r}: lacks {missing}; load what controller.state_dict() gave")
    method = controller.run.method.name
    if state["method"] != method:
        raise ValueError(
            f"the state is of method {state['method']!r}, and the model is patched with {method!r}; patch it with the "
            f"method of the run that goes on, or start a new run from its weights"
        )
    _check_ints(0, controller.total_steps, step=state["step"])
    _check_ints(0, micro_step=state["micro_step"], seed=state["seed"])
    is_lost = controller._has_own_optimizer and not controller.optimizer.state
    if is_lost and state["step"] and state["uses_optimizer_state"]:
        raise ValueError(
            f"cannot go on at step {state['step']} of {controller.total_steps}: method {method!r} trains by the state "
            f"of its own optimizer, and that is not loaded. Load it before the controller's; a checkpoint of "
            f"save_only_model=True has none, and can only start a new run"
        )
    unknown = sorted(set(state["flips"]) - set(controller.weights))
    if unknown:
        raise ValueError(f"flips of {unknown[:5]}: the state is of another model, this one has no such weights")


def _check_ints(low: int, high: int | None = None, **values: Any) -> None:
    for name, value in values.items():
        if type(value) is not int or value < low or (high is not None and value > high):
            allowed = f">= {low}" if high is None else f"in {low}..{high}"
            raise ValueError(f"{name}={value!r}: must be an int {allowed}")
