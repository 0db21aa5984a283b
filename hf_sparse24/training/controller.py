"""Sparse24Controller: everything that happens between steps, without any Trainer.

Forward decides nothing: gradient checkpointing and accumulation repeat it. What changes during training changes here,
as the method says: phases, state such as masks, what it adds to gradients; and the random streams of MVUE.
"""

from typing import Any

import sparse24_kernels as kernels
import torch
from torch import Tensor, nn

from ..adapters import check_adapters
from ..adapters.attaching import attach_adapters
from ..adapters.merging import adapters_in
from ..methods import StepContext
from ..patching import adopt, set_phase
from ..weight import SparseWeight, check_whole, first_of_each, layer_name, sparse_weights
from .random_streams import RandomStreams


class Sparse24Controller:
    """Runs a patched model's sparsity in a training loop of your own.

    ```python
    patch_model(model, config)
    optimizer = torch.optim.AdamW(model.parameters())
    controller = Sparse24Controller(model, optimizer, total_steps=1000)
    for batch in data:
        for micro_batch in batch:
            model(**micro_batch).loss.backward()
            controller.after_micro_step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    ```

    It follows the optimizer: right before each of its steps, when gradients are final, the method adds its own; right
    after, it counts the step, switches the phase and refreshes state. A call of `optimizer.step()` that takes no step,
    as accelerate skips it while gradients accumulate, or a GradScaler when they overflow, is none here.

    Pruned weights are kept from one step to the next, for all micro-batches in between. Whoever writes weights there
    through `.data` calls `weight.clear_encodings()` on `sparse_weights(model).values()`.

    To resume, make everything as at the start, then load the `state_dict` of the model, of the optimizer, and of the
    controller, in this order. A new controller takes a model over from its earlier one.

    Args:
        model: a patched model, plain or wrapped by DDP.
        optimizer: the optimizer of its trainable parameters.
        total_steps: optimizer steps of the whole run, finished ones included.
        seed: of MVUE's random streams, >= 0. Give every process its own (`seed + rank`), so that they draw
            independently.
        step: optimizer steps already done, when resuming.
        metrics_interval: the flip rate is measured at steps 1 and every multiple of this; measuring costs two mask
            computations.

    Raises:
        ValueError: the model is not patched, the schedule does not fit `total_steps`, a trainable sparse weight is
            not in the optimizer, the method needs another optimizer or a setting that is still `"auto"`, a weight
            is sharded, which this version does not support, or a number is out of its range.
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
        self.weights = sparse_weights(model)
        attach_adapters(model)  # those that PEFT has not found by its registry
        check_adapters(model)
        config = adopt(model)
        if config is None:
            raise ValueError("the model is not patched; call patch_model(model) first")
        self.model, self.total_steps, self.seed, self.metrics_interval = model, total_steps, seed, metrics_interval
        self.method, self.run_state = config.bound_method, config.run_state
        # accelerate wraps optimizers; a method knows its own by class.
        is_schedule = isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler)
        self.optimizer: torch.optim.Optimizer = optimizer if is_schedule else getattr(optimizer, "optimizer", optimizer)
        _check_optimizer(self.weights, self.optimizer)
        self._trained = {name: weight for name, weight in self.weights.items() if _trains(weight)}
        # Below an adapter, no schedule may change what a frozen weight computes.
        self._keeps_phase = not self._trained or _any_frozen_below_adapters(model)
        if not self._keeps_phase:
            self.method.check_run(total_steps, self.optimizer)
        self.step = step
        self.micro_step = 0
        self._takes_step = False
        self._flips: dict[str, Tensor] = {}
        self._masks_before: dict[str, Tensor] = {}
        if self.run_state.controller is not None:
            self.run_state.controller.end()
        self._streams = RandomStreams(list(self.weights.values()))
        self._enter_phase()
        for weight in self.weights.values():
            if not weight.state_is_ready:
                weight.init_state()
        self._streams.set(self.seed, self.step, self.micro_step)
        self.run_state.begin_step()
        self.run_state.controller = self
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._before_optimizer),
            self.optimizer.register_step_post_hook(self._after_optimizer),
        ]

    @property
    def phase(self) -> str:
        """`"sparse"`, `"dense"`, or another phase of the method: how the model computes in the step that comes next.

        A model whose sparse weights are all frozen, or frozen below adapters, keeps its phase, as do copies of modules
        that train beside the adapters: all weights of a model are in one.
        """
        if self._keeps_phase:
            return self.run_state.phase
        return self.method.phase(self.step, self.total_steps, self.optimizer)

    @property
    def is_running(self) -> bool:
        """Whether it follows the optimizer: it has not ended, and no other controller has taken the model over."""
        return self.run_state.controller is self

    def after_micro_step(self) -> None:
        """Call after the backward pass of each micro-batch, so that the next one draws other MVUE samples.

        The call after an optimizer step's last micro-batch may be left out: the next step starts afresh.
        """
        self.micro_step += 1
        self._streams.set(self.seed, self.step, self.micro_step)

    def skip_step(self) -> None:
        """Count a step that the optimizer did not take, where whoever counts the run's steps counts such steps."""
        self._after_step()

    def end(self) -> None:
        """Call where training stops before `total_steps`: pruned weights are no longer kept, and the optimizer's steps
        no longer followed."""
        for hook in self._hooks:
            hook.remove()
        if not self.is_running:
            return
        self.run_state.end_step()
        self.run_state.controller = None
        self._streams.end()

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]):
        """torch calls it when `optimizer.step(*args[1:], **kwargs)` begins, and goes on with what it returns."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return self._before_step()

        def final_gradients() -> Any:  # they are made within the step
            loss = closure()
            self._before_step()
            return loss

        if len(args) > 1:
            return (args[0], final_gradients, *args[2:]), kwargs
        return args, kwargs | {"closure": final_gradients}

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._takes_step:
            self._takes_step = False
            self._after_step()

    @torch.no_grad()
    def _before_step(self) -> None:
        """Right before the optimizer uses the gradients."""
        if self.step >= self.total_steps:
            raise RuntimeError(
                f"total_steps={self.total_steps} are done, and the optimizer takes another; make the controller with "
                f"the steps of the whole run, or call controller.end() to go on without it"
            )
        self._takes_step = _unscale(self.optimizer)
        if not self._takes_step:
            return
        measures = (self.step + 1) % self.metrics_interval == 0 or self.step == 0
        # Where masks change at refreshes alone, `_refresh` measures their flips.
        keeps_masks = measures and not self.method.flips_at_refresh
        context = self._context(packed_masks=keeps_masks)
        self._add_gradient_of_loss(context)
        self.method.before_step(self.weights, context)
        if keeps_masks:
            self._masks_before = {
                name: context.mask(name, weight) for name, weight in first_of_each(self.weights).items()
            }
        self.run_state.end_step()
        for weight in self.weights.values():
            weight.clear_encodings()  # the optimizer can use the memory

    @torch.no_grad()
    def _after_step(self) -> None:
        """Right after an optimizer step: counts it, switches the phase, refreshes state."""
        self.step += 1
        self.micro_step = 0
        if self._masks_before:
            self._flips = self._count_flips(self._masks_before)
            self._masks_before = {}
        phase = self.phase
        if phase != self.run_state.phase:
            self._enter_phase()
        elif phase != "dense" and self._trained and self.method.refreshes_state(self.step, self.total_steps):
            self._refresh()
        self.method.after_step(self.weights, self._context())
        self._streams.set(self.seed, self.step, self.micro_step)
        if self.step < self.total_steps:
            self.run_state.begin_step()
        else:
            self.run_state.end_step()

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """What to log now.

        Returns:
            `sparse_phase`: 1.0 while sparse, 0.0 while dense. `kept_magnitude`: share of the sparse weights' L1 norm
            that the masks keep. `flip_rate`: share of sparse weights that entered or left the mask in the last
            measured step, or, where masks change at refreshes alone, in the last refresh; absent before the first.
            And what the method adds.
        """
        kept = total = torch.zeros(())
        for weight in self.weights.values():
            magnitude = weight.parameter.detach().float().abs()
            kept = kept + (magnitude * weight.mask()).sum().cpu()
            total = total + magnitude.sum().cpu()
        values = {"sparse_phase": float(self.phase != "dense"), "kept_magnitude": float(kept / total.clamp(min=1e-38))}
        if self._flips:
            sizes = sum(self.weights[name].parameter.numel() for name in self._flips)
            values["flip_rate"] = float(sum(self._flips.values())) / sizes
        return values | self.method.metrics(self.weights)

    def layer_flip_rates(self) -> dict[str, float]:
        """`flip_rate` by layer, as last measured; a weight that layers share stands under the first of them."""
        sizes = {name: self.weights[name].parameter.numel() for name in self._flips}
        return {layer_name(name): float(flips) / sizes[name] for name, flips in self._flips.items()}

    def state_dict(self) -> dict[str, Any]:
        """What the controller needs to go on, as plain numbers. Masks and scales are in the model's `state_dict`."""
        flips = {name: int(count) for name, count in self._flips.items()}
        return {"step": self.step, "micro_step": self.micro_step, "seed": self.seed, "flips": flips}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`; load the model's own `state_dict` first.

        Raises:
            ValueError: not what `state_dict` gives, or of another model or a longer run. Nothing is changed then.
        """
        state = {"flips": {}} | state  # 0.1 saved none
        flips, missing = state["flips"], sorted(set(self.state_dict()) - set(state))
        if missing:
            raise ValueError(f"state={state!r}: lacks {missing}; load what controller.state_dict() gave")
        _check_ints(0, self.total_steps, step=state["step"])
        _check_ints(0, micro_step=state["micro_step"], seed=state["seed"])
        unknown = sorted(set(flips) - set(self.weights))
        if unknown:
            raise ValueError(f"flips of {unknown[:5]}: the state is of another model, this one has no such weights")
        self.step, self.micro_step, self.seed = state["step"], state["micro_step"], state["seed"]
        self._flips = {name: torch.tensor(count) for name, count in flips.items()}
        set_phase(self.model, self.phase)
        self._streams.set(self.seed, self.step, self.micro_step)

    def _context(self, packed_masks: bool = False) -> StepContext:
        # Asked for anew: loading an optimizer's state gives it other group objects.
        groups = _groups_of_weights(self.weights, self.optimizer)
        phase = self.run_state.phase
        return StepContext(self.step, self.total_steps, phase, self.optimizer, groups, packed_masks)

    def _add_gradient_of_loss(self, context: StepContext) -> None:
        """The method's term of the loss, by its gradient: it does not matter who computes the loss itself."""
        with torch.enable_grad():
            term = self.method.loss(self.weights, context)
        if term is None or not term.requires_grad:  # the latter where all that it depends on is frozen
            return
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        for parameter, gradient in zip(parameters, torch.autograd.grad(term, parameters, allow_unused=True)):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _enter_phase(self) -> None:
        """Set the phase of the current step; state starts from the weights when it turns sparse."""
        phase = self.phase
        if phase != "dense" and self.run_state.phase == "dense":
            for weight in self._trained.values():
                weight.init_state()
        set_phase(self.model, phase)

    def _refresh(self) -> None:
        """State anew of the weights that train; where only that changes masks, their flips are measured here."""
        before = (
            {name: w.mask(packed=True) for name, w in self._trained.items()} if self.method.flips_at_refresh else {}
        )
        for weight in self._trained.values():
            weight.init_state()
        if before:
            self._flips = self._count_flips(before)

    def _count_flips(self, before: dict[str, Tensor]) -> dict[str, Tensor]:
        """By weight, how many of its entries have entered or left the mask since."""
        after = [self.weights[name].mask(packed=True) for name in before]
        return dict(zip(before, kernels.count_flips(list(before.values()), after)))


def _trains(weight: SparseWeight) -> bool:
    return any(tensor.requires_grad for tensor in (weight.parameter, *weight.parameters.values()))


def _any_frozen_below_adapters(model: nn.Module) -> bool:
    adapted = (module.get_base_layer() for module in adapters_in(model))
    return any(not _trains(weight) for layer in adapted for weight in sparse_weights(layer).values())


def _check_ints(low: int, high: int | None = None, **values: Any) -> None:
    for name, value in values.items():
        if type(value) is not int or value < low or (high is not None and value > high):
            allowed = f">= {low}" if high is None else f"in {low}..{high}"
            raise ValueError(f"{name}={value!r}: must be an int {allowed}")


def _check_optimizer(weights: dict[str, SparseWeight], optimizer: Any) -> None:
    """It is one that can be followed, and holds all that is trainable of whole weights."""
    if type(optimizer).__module__.startswith("deepspeed"):
        raise ValueError("DeepSpeed trains shards of the weights, which this version does not support; use DDP")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer={type(optimizer).__name__}: must be a torch.optim.Optimizer")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, weight in weights.items():
        check_whole(name, weight.parameter)
        own = {f"{name}, {kept}": tensor for kept, tensor in weight.parameters.items()}
        for trained, tensor in {name: weight.parameter, **own}.items():
            if tensor.requires_grad and id(tensor) not in held:
                raise ValueError(
                    f"the optimizer does not hold {trained}, which is trainable; make the optimizer from this model's "
                    f"parameters after patch_model, or freeze it"
                )


def _groups_of_weights(weights: dict[str, SparseWeight], optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """The optimizer's param group of each weight; frozen weights have none."""
    owners = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    ids = {name: id(weight.parameter) for name, weight in weights.items()}
    return {name: owners[key] for name, key in ids.items() if key in owners}


def _unscale(optimizer: Any) -> bool:
    """Let gradients be final where a GradScaler leaves that to the optimizer, as it does to torch's fused ones.

    Returns:
        False where such an optimizer is going to skip the step, because gradients have overflowed.
    """
    found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if found_inf is not None and found_inf.item():
        return False
    if scale is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(scale)
        optimizer.grad_scale = None
    return True
