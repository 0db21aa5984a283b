"""The optimizer as the controller follows it: checks, and hooks around its steps."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from ..methods import Piece, SparseMethod
from ..progress import get_logger
from ..weights.sharding import check_supported, is_sharded, local, local_gradient
from ..weights.sparse_weight import SparseWeight, first_of_each
from .zero import ZeroOptimizer

logger = get_logger(__name__)

_SEVERAL = "of several, such as Muon and AdamW, make one that takes the steps of all; docs/guides/own_loop.md has it"


def followed(optimizer: object, method: SparseMethod) -> "TorchOptimizer | ZeroOptimizer":
    """The optimizer as the controller follows it, without accelerate's wrapper. ValueError: it cannot be followed."""
    zero = "deepspeed.runtime"
    if not isinstance(optimizer, LRScheduler) and not type(optimizer).__module__.startswith(zero):
        optimizer = getattr(optimizer, "optimizer", optimizer)
    if type(optimizer).__module__.startswith(zero):
        return ZeroOptimizer(optimizer, method)
    if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        way = f"must be a torch.optim.Optimizer, with the hooks that its __init__(param_groups, {{}}) makes; {_SEVERAL}"
        raise ValueError(f"optimizer={type(optimizer).__name__}: {way}")
    if hasattr(optimizer, "fused_backward"):
        way = "it updates weights within backward, before masked decay and without steps to follow"
        raise ValueError(f"optimizer={type(optimizer).__name__}: {way}; take AdamW, or another that updates in step()")
    return TorchOptimizer(optimizer)


def check_optimizer(weights: Mapping[str, SparseWeight], optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if the optimizer lacks a trainable part of a sparse weight; warn if fp16 rounds its eps to 0."""
    pairs = ((group.get("eps"), p) for group in optimizer.param_groups for p in group["params"])
    if tiny := [eps for eps, p in pairs if p.dtype == torch.float16 and isinstance(eps, float) and 0 < eps < 2**-25]:
        way = "load them by from_pretrained(name, dtype='float32') and train with fp16=True or bf16=True, or raise eps"
        logger.warning(f"eps={tiny[0]} is 0 in fp16, by which the optimizer may turn fp16 weights into NaN: {way}")
    held = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    if any(is_sharded(weight.master) and not weight.storage.is_split for weight in weights.values()):
        # FSDP2 sums gradients over processes of what it has sharded, and of nothing that was added later.
        plain = [tuple(p.shape) for p in held.values() if p.requires_grad and not is_sharded(p)]
        if plain:
            way = f"such as one of shape {plain[0]}: add adapters, then call fully_shard, then make the optimizer"
            raise ValueError(f"FSDP2 has not sharded {len(plain)} parameters that train, {way}")
    is_part = any(id(weight.master) in held for weight in weights.values())
    for name, weight in weights.items():
        check_supported(name, weight.master)
        own = {f"{name}, {kept}": tensor for kept, tensor in weight.parameters.items()}
        for trained, tensor in {name: weight.master, **own}.items():
            if tensor.requires_grad and id(tensor) not in held:
                way = "make it after patch_model (with DeepSpeed, pass engine.optimizer), or pass the one that holds it"
                if is_part and trained == name:
                    way = f"a controller follows one optimizer, and this one holds other sparse weights; {_SEVERAL}"
                raise ValueError(f"the optimizer does not hold {trained}, which is trainable: {way}; or freeze it")


def warn_of_steps(optimizer: torch.optim.Optimizer | ZeroOptimizer, step: int) -> None:
    """Warn where an optimizer has taken more steps than its new controller has counted. Skipped ones make it fewer."""
    state = optimizer.zero.optimizer.state if isinstance(optimizer, ZeroOptimizer) else optimizer.state
    entries = [*state.values(), *optimizer.param_groups]
    counts = [({"step": None} | entry)["step"] for entry in entries if isinstance(entry, dict)]
    taken = max(
        (int(torch.as_tensor(x, device="cpu").max()) for x in counts if isinstance(x, int | float | Tensor)), default=0
    )
    if taken > step + 1:  # torch.distributed.checkpoint takes an empty one to make the state
        way = "where a run goes on, pass the steps done as step=, or the earlier controller's state to load_state_dict"
        way += "; where a new run begins with this optimizer, nothing is wrong"
        logger.warning(f"the optimizer has taken {taken} steps, its controller is at step={step}: {way}")


class TorchOptimizer:
    """A `torch.optim.Optimizer` as the controller follows it: calls around its steps, and pieces of weights."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self._takes_step = False

    def pieces(self, weights: Mapping[str, SparseWeight], mask: Callable[[str], Tensor]) -> list[Piece]:
        """The pieces of weights with a gradient that this process updates; `mask` gives a weight's mask by name."""
        # Looked up each time: loading an optimizer's state gives it other group objects.
        groups = {id(parameter): group for group in self.optimizer.param_groups for parameter in group["params"]}
        pieces = []
        for name, weight in first_of_each(weights).items():
            values, gradient = local(weight.master), local_gradient(weight.master)
            if gradient is None or not values.numel():  # there may be more processes than rows
                continue
            rate = groups.get(id(weight.master), {}).get("lr")
            pieces.append(Piece(name, values, gradient, float(rate or 0), partial(mask, name)))
        return pieces

    def follow(
        self, before: Callable[[], None], change: Callable[[], None], after: Callable[[], None]
    ) -> list[RemovableHandle]:
        """Call `before` and `change` right before each step that is taken, `after` right after. The handles end it."""

        def final_gradients() -> None:
            if not self._is_within_step():
                self._takes_step = _unscale(self.optimizer)
                if self._takes_step:
                    before()
                    change()

        def pre_hook(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            """torch calls it when `optimizer.step(*args[1:], **kwargs)` begins, and goes on with what it returns."""
            self._takes_step = self._is_within_step()
            if kwargs == {"closure": None} and not any(group.get("lr", 1) for group in optimizer.param_groups):
                return None  # torch.distributed.checkpoint lets the optimizer make its state so, before it loads that
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            if closure is None:
                return final_gradients()

            def and_final_gradients() -> object:  # Lightning makes them within the step
                loss = closure()
                final_gradients()
                return loss

            return args[:1], kwargs | {"closure": and_final_gradients}

        def post_hook(*_: object) -> None:
            if self._takes_step:
                self._takes_step = False
                after()

        return [self.optimizer.register_step_pre_hook(pre_hook), self.optimizer.register_step_post_hook(post_hook)]

    def _is_within_step(self) -> bool:
        """Whether a `step` calls that of its base class: torch wraps `step` of each class, and calls hooks in both."""
        if not self._takes_step:
            return False
        steps = {cls.step for cls in type(self.optimizer).__mro__ if issubclass(cls, torch.optim.Optimizer)}
        return sum(hasattr(step, "hooked") for step in steps) > 1


def _unscale(optimizer: torch.optim.Optimizer) -> bool:
    """Unscale the gradients where a GradScaler leaves that to the optimizer, as to torch's fused ones. False where the
    optimizer is going to skip the step, because gradients have overflowed."""
    found_inf, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
    if found_inf is not None and found_inf.item():
        return False
    if scale is not None:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter.grad is not None:
                parameter.grad.div_(scale)
        vars(optimizer)["grad_scale"] = None
    return True
