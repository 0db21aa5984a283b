"""Sparse24Controller: everything that happens between steps, without any Trainer.

Forward decides nothing: gradient checkpointing and accumulation repeat it. What changes during training changes here,
as the method says: phases, state such as masks, what it adds to gradients; and the random streams of MVUE.
"""

from typing import Any

import torch
from sparse24_kernels.masks import count_flips
from torch import Tensor, nn

from ..adapters import check_adapters
from ..adapters.attaching import attach_adapters
from ..adapters.merging import adapters_in
from ..methods import StepContext
from ..patching import adopt, set_phase, unwrap
from ..progress import get_logger
from ..sharding import local, rank, total
from ..weight import SparseWeight, first_of_each, layer_name, sparse_weights
from .optimizers import check_optimizer, followed, groups_of_weights, unscale
from .random_streams import RandomStreams
from .ranks import check_ranks_agree
from .zero import ZeroOptimizer

logger = get_logger(__name__)


class Sparse24Controller:
    """Runs a patched model's sparsity in a training loop of your own.

    It follows the optimizer: right before each of its steps, when gradients are final, the method adds its own; right
    after, it counts the step, switches the phase and refreshes state. A call of `optimizer.step()` that takes no step,
    as accelerate skips it while gradients accumulate, or a GradScaler when they overflow, is none here.

    Pruned weights are kept from one step to the next, for all micro-batches in between. Code that writes weights there
    through `.data` must call `weight.clear_encodings()` on `hf_sparse24.weight.sparse_weights(model).values()`.

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
        weights: the sparse weights by name.
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
        if getattr(model, "broadcast_buffers", False):
            logger.warning(
                "DDP copies masks and scales to all processes in every forward pass, so that weights are pruned anew "
                "for each micro-batch; they are the same anyway: pass broadcast_buffers=False (from torch 2.13 on "
                "forward_sync_buffers=False), or ddp_broadcast_buffers=False to a Trainer"
            )
        model = unwrap(model)
        self.weights = sparse_weights(model)
        attach_adapters(model)  # those that PEFT has not found by its registry
        check_adapters(model)
        if any(weight.is_split for weight in self.weights.values()) and adapters_in(model):
            raise ValueError(
                "adapters around weights that tensor parallelism splits are not supported; use FSDP2 or DDP with them"
            )
        config = adopt(model)
        if config is None:
            raise ValueError("the model is not patched; call patch_model(model) first")
        self.model, self.total_steps, self.seed, self.metrics_interval = model, total_steps, seed, metrics_interval
        self.method, self.run_state = config.bound_method, config.run_state
        self.optimizer = followed(optimizer, self.method)
        check_optimizer(self.weights, self.optimizer)
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
        numbers = {"total_steps": total_steps, "step": step, "seed": seed, "metrics_interval": metrics_interval}
        check_ranks_agree(self.weights, config.to_dict() | numbers)
        self._set_streams()
        self.run_state.begin_step()
        self.run_state.controller = self
        if isinstance(self.optimizer, ZeroOptimizer):
            self._hooks = self.optimizer.follow(self._before_step, self._change_pieces, self._after_step)
        else:
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
        self._set_streams()

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
        self._takes_step = False
        if kwargs == {"closure": None} and not any(group.get("lr", 1) for group in optimizer.param_groups):
            return None  # torch.distributed.checkpoint lets the optimizer make its state so, before it loads that
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
        self._takes_step = unscale(self.optimizer)
        if not self._takes_step:
            return
        measures = (self.step + 1) % self.metrics_interval == 0 or self.step == 0
        # Where masks change at refreshes alone, `_refresh` measures their flips.
        keeps_masks = measures and not self.method.flips_at_refresh
        context = self._context(packed_masks=keeps_masks)
        if not isinstance(self.optimizer, ZeroOptimizer):  # it has the gradients one group at a time
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
    def _change_pieces(self) -> None:
        """Right before ZeRO uses the gradients of a group: what the method adds to this process's part of them."""
        self.method.before_step(self.optimizer.pieces(self.weights), self._context())

    @torch.no_grad()
    def _after_step(self) -> None:
        """Right after an optimizer step: counts it, switches the phase, refreshes state."""
        self.step += 1
        self.micro_step = 0
        phase = self.phase
        if phase != self.run_state.phase:
            self._enter_phase()
        elif phase != "dense" and self._trained and self.method.refreshes_state(self.step, self.total_steps):
            self._refresh()
        if self._masks_before:  # of a step and of the refresh after it
            self._flips = self._count_flips(self._masks_before)
            self._masks_before = {}
        self.method.after_step(self.weights, self._context())
        self._set_streams()
        if self.step < self.total_steps:
            self.run_state.begin_step()
        else:
            self.run_state.end_step()

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """What to log now.

        Returns:
            `sparse_phase` is 1.0 while sparse, 0.0 while dense. `kept_magnitude` is the share of the sparse weights' L1
            norm that the masks keep. `flip_rate` is the share of sparse weights that entered or left the mask in the
            last measured step, or, where masks change at refreshes alone, in the last refresh; it is absent before the
            first. And what the method adds. Where weights are sharded, all processes must ask.
        """
        sums = []
        for weight in self.weights.values():
            magnitude = local(weight.master).float().abs()
            sums.append(torch.stack([(magnitude * weight.local_mask()).sum(), magnitude.sum()]).cpu())
        kept, all_of_it = total(sums, [weight.master for weight in self.weights.values()]).sum(0).tolist()
        values = {"sparse_phase": float(self.phase != "dense"), "kept_magnitude": kept / max(all_of_it, 1e-38)}
        if self._flips:
            sizes = sum(self.weights[name].master.numel() for name in self._flips)
            values["flip_rate"] = float(sum(self._flips.values())) / sizes
        return values | self.method.metrics(self.weights, self.optimizer)

    def layer_flip_rates(self) -> dict[str, float]:
        """`flip_rate` by layer, as last measured; a weight that layers share stands under the first of them.

        Returns:
            Name of the layer to share of its weights that entered or left the mask. Empty before the first measurement.
        """
        sizes = {name: self.weights[name].master.numel() for name in self._flips}
        return {layer_name(name): float(flips) / sizes[name] for name, flips in self._flips.items()}

    def state_dict(self) -> dict[str, Any]:
        """What the controller needs to go on, as plain numbers. Masks and scales are in the model's `state_dict`.

        Returns:
            `method`, `step`, `micro_step`, `seed`, and `flips`, a dict by name of the weight.
        """
        flips = {name: int(count) for name, count in self._flips.items()}
        numbers = {"step": self.step, "micro_step": self.micro_step, "seed": self.seed}
        return {"method": self.method.name, **numbers, "flips": flips}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`; load the model's own `state_dict` first.

        Args:
            state: what `state_dict()` gave.

        Raises:
            ValueError: not what `state_dict` gives, or of another method, another model or a longer run. Nothing is
                changed then.
        """
        state = {"flips": {}, "method": self.method.name} | state  # 0.1 saved none
        flips, missing = state["flips"], sorted(set(self.state_dict()) - set(state))
        if missing:
            raise ValueError(f"state={state!r}: lacks {missing}; load what controller.state_dict() gave")
        if state["method"] != self.method.name:
            raise ValueError(
                f"the state is of method {state['method']!r}, and the model is patched with {self.method.name!r}; "
                f"patch it with the method of the run that goes on, or start a new run from its weights"
            )
        _check_ints(0, self.total_steps, step=state["step"])
        _check_ints(0, micro_step=state["micro_step"], seed=state["seed"])
        unknown = sorted(set(flips) - set(self.weights))
        if unknown:
            raise ValueError(f"flips of {unknown[:5]}: the state is of another model, this one has no such weights")
        self.step, self.micro_step, self.seed = state["step"], state["micro_step"], state["seed"]
        self._flips = {name: torch.tensor(count) for name, count in flips.items()}
        set_phase(self.model, self.phase)
        self._set_streams()

    def _set_streams(self) -> None:
        self._streams.set(self.seed + rank(), self.step, self.micro_step)

    def _context(self, packed_masks: bool = False) -> StepContext:
        # Asked for anew: loading an optimizer's state gives it other group objects.
        groups = groups_of_weights(self.weights, self.optimizer)
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
        counted = self._trained if self.method.flips_at_refresh else {}
        before = {name: weight.local_mask(packed=True) for name, weight in counted.items()}
        for weight in self._trained.values():
            weight.init_state()
        if before:
            self._flips = self._count_flips(before)

    def _count_flips(self, before: dict[str, Tensor]) -> dict[str, Tensor]:
        """By weight, how many of its entries have entered or left the mask since, on all processes."""
        after = [self.weights[name].local_mask(packed=True) for name in before]
        counts = count_flips(list(before.values()), after)
        return dict(zip(before, total(list(counts), [self.weights[name].master for name in before])))


def _trains(weight: SparseWeight) -> bool:
    return any(tensor.requires_grad for tensor in (weight.master, *weight.parameters.values()))


def _any_frozen_below_adapters(model: nn.Module) -> bool:
    adapted = (module.get_base_layer() for module in adapters_in(model))
    return any(not _trains(weight) for layer in adapted for weight in sparse_weights(layer).values())


def _check_ints(low: int, high: int | None = None, **values: Any) -> None:
    for name, value in values.items():
        if type(value) is not int or value < low or (high is not None and value > high):
            allowed = f">= {low}" if high is None else f"in {low}..{high}"
            raise ValueError(f"{name}={value!r}: must be an int {allowed}")
