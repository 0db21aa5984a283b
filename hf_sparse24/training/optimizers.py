"""What the controller asks of an optimizer, of any class that torch's hooks work for."""

from typing import Any

import torch

from ..methods import SparseMethod
from ..weights.sharding import is_sharded
from ..weights.sparse_weight import SparseWeight, check_sharding
from .zero import ZeroOptimizer, is_deepspeed


def followed(optimizer: Any, method: SparseMethod) -> Any:
    """The optimizer that the controller follows: not accelerate's wrapper, since a method knows its own by class; and
    that of DeepSpeed as a `ZeroOptimizer`."""
    if not is_deepspeed(optimizer) and not isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler):
        optimizer = getattr(optimizer, "optimizer", optimizer)
    return ZeroOptimizer(optimizer, method) if is_deepspeed(optimizer) else optimizer


def check_optimizer(weights: dict[str, SparseWeight], optimizer: Any) -> None:
    """It is one that can be followed, and holds all that is trainable of whole weights."""
    if not isinstance(optimizer, torch.optim.Optimizer | ZeroOptimizer):
        raise ValueError(f"optimizer={type(optimizer).__name__}: must be a torch.optim.Optimizer")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    _check_all_sharded(weights, optimizer)
    for name, weight in weights.items():
        check_sharding(name, weight.master)
        own = {f"{name}, {kept}": tensor for kept, tensor in weight.parameters.items()}
        for trained, tensor in {name: weight.master, **own}.items():
            if tensor.requires_grad and id(tensor) not in held:
                in_zero = hasattr(tensor, "_hp_mapping")
                way = "pass engine.optimizer" if in_zero else "make it from this model's parameters after patch_model"
                raise ValueError(
                    f"the optimizer does not hold {trained}, which is trainable; {way}, or freeze that weight"
                )


def _check_all_sharded(weights: dict[str, SparseWeight], optimizer: Any) -> None:
    """FSDP2 sums gradients over processes of what it has sharded, and of nothing that was added later."""
    if not any(is_sharded(weight.master) and not weight.is_split for weight in weights.values()):
        return
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    plain = [tuple(parameter.shape) for parameter in trained if not is_sharded(parameter)]
    if plain:
        raise ValueError(
            f"FSDP2 has sharded the sparse weights, but not {len(plain)} parameters that train, such as one of shape "
            f"{plain[0]}: processes would train them apart. Add adapters first, then call fully_shard, then make the "
            f"optimizer"
        )


def groups_of_weights(weights: dict[str, SparseWeight], optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """The optimizer's param group of each weight; frozen weights have none."""
    owners = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    ids = {name: id(weight.master) for name, weight in weights.items()}
    return {name: owners[key] for name, key in ids.items() if key in owners}


def unscale(optimizer: Any) -> bool:
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
