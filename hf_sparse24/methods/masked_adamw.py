"""MaskedAdamW, the base of the methods' own optimizers: AdamW with another step for groups of masked weights."""

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from transformers import Trainer

from ..weights.sharding import local, local_gradient
from ..weights.sparse_weight import sparse_weights

Group = dict[str, Any]
"""A parameter group of an optimizer: `"params"`, `"masked"`, and AdamW's arguments."""


class GroupTensors(NamedTuple):
    """A group's tensors that have a gradient, as parallel lists: this process's shards, and the whole `owners`."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    steps: list[Tensor]
    owners: list[Tensor]


class MaskedAdamW(torch.optim.Optimizer):
    """AdamW, bit for bit; a subclass says how groups with `"masked": True` are updated instead.

    Each process updates its shards of sharded parameters (FSDP2, tensor parallelism).

    Args:
        params: parameter groups, at least one of them masked. `step_param_groups` makes those of a patched model.
        lr: as in `torch.optim.AdamW`.
        betas: as there.
        eps: as there.
        weight_decay: as there.

    Raises:
        ValueError: a value out of its range, or no masked group.
    """

    def __init__(
        self, params: Iterable[Group], lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "masked": False}
        super().__init__(params, defaults)
        for group in self.param_groups:
            for name in ("lr", "eps", "weight_decay"):
                if not 0 <= group[name] < math.inf:
                    raise ValueError(f"{name}={group[name]!r}: must be a finite number >= 0")
            if not all(0 <= beta < 1 for beta in group["betas"]):
                raise ValueError(f"betas={group['betas']!r}: must be in [0, 1)")
        if not any(group["masked"] for group in self.param_groups):
            raise ValueError("no parameter group has 'masked': True; make the groups with step_param_groups(model)")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step, and return the loss of `closure` if there is one, as in `torch.optim.AdamW`.

        Raises:
            RuntimeError: a gradient is a sparse tensor, or a subclass cannot take the step.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        batches = [(group, batch) for group in self.param_groups if (batch := self._gather(group)).params]
        self.before_groups([batch for group, batch in batches if group["masked"]])
        for group, batch in batches:
            if group["masked"]:
                self.masked_step(group, batch)
            else:
                MaskedAdamW.masked_step(self, group, batch)
        self.after_groups()
        return loss

    def before_groups(self, masked: list[GroupTensors]) -> None:
        """Run before any parameter changes, with the tensors of the masked groups; may raise RuntimeError."""

    def masked_step(self, group: Group, batch: GroupTensors) -> None:
        """Update the parameters of a masked group. Default: AdamW's step, by torch's own function, to the last bit."""
        beta1, beta2 = group["betas"]
        settings = {name: group[name] for name in ("lr", "weight_decay", "eps")}
        adamw(*batch[:4], [], batch.steps, amsgrad=False, beta1=beta1, beta2=beta2, maximize=False, **settings)

    def after_groups(self) -> None:
        """Run after all parameters have changed."""

    def _gather(self, group: Group) -> GroupTensors:
        """A group's parameters that have a gradient, with their state, which is made at the first gradient."""
        batch = GroupTensors([], [], [], [], [], [])
        for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
            state = self.state[parameter]
            if not state:
                # On the CPU, as AdamW has it, and in fp32: a bf16 number cannot count beyond 256.
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            moments = local(state["exp_avg"]), local(state["exp_avg_sq"])
            tensors = (local(parameter), local_gradient(parameter), *moments, state["step"], parameter)
            for values, value in zip(batch, tensors):
                values.append(value)
        return batch


def step_param_groups(
    model: nn.Module, weight_decay: float = 0.01, decay_names: Collection[str] | None = None
) -> list[Group]:
    """The trainable parameters of a patched model as groups for a method's optimizer, in a loop of your own.

    Args:
        model: a patched model. Its sparse weights go into groups with `"masked": True`.
        weight_decay: of the parameters in `decay_names`; the others get 0.
        decay_names: names of parameters to decay. None for those that a Trainer decays: all but biases and norms. A
            method's own trainable tensors are never decayed.

    Returns:
        At most four groups, masked and other, decayed and not, each with at least one parameter.
    """
    if decay_names is None:
        decay_names = Trainer.get_decay_parameter_names(cast(Trainer, None), model)  # which uses no Trainer
    weights, decay_names = sparse_weights(model).values(), set(decay_names)
    masked_weights = {id(weight.master) for weight in weights}
    own = {id(parameter) for weight in weights for parameter in weight.parameters.values()}
    groups: dict[tuple[bool, bool], Group] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            masked, decayed = id(parameter) in masked_weights, name in decay_names and id(parameter) not in own
            group = {"params": [], "masked": masked, "weight_decay": weight_decay if decayed else 0.0}
            groups.setdefault((masked, decayed), group)["params"].append(parameter)
    return list(groups.values())
