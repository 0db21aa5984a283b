"""The optimizer that the controller follows with DeepSpeed ZeRO-1 and ZeRO-2. Nothing here imports DeepSpeed.

Every process has whole weights, masks and scales. ZeRO optimizes an fp32 copy: the parameters of a group form one flat
tensor, and each process updates a piece of it, which may begin and end anywhere in a weight.

ZeRO's step takes the groups one by one: it unscales and clips the gradient, then the optimizer below updates the piece.
In the end every process gets all pieces. So gradients are final group by group, and weights are new when the step ends.

The attributes of DeepSpeed's classes used here are in 0.19.8, the version of the tests.
"""

from collections.abc import Callable, Mapping
from typing import Any, Self, cast

from torch import Tensor

from ..methods import Piece, SparseMethod
from ..methods.masked_adamw import Group
from ..weights.sparse_weight import SparseWeight, first_of_each


class ZeroOptimizer:
    """The optimizer of ZeRO-1 or ZeRO-2 as the controller follows it; see `TorchOptimizer`. ValueError: it is another
    optimizer of DeepSpeed, or the method makes its own optimizer."""

    def __init__(self, zero: Any, method: SparseMethod):
        if type(zero).__name__ != "DeepSpeedZeroOptimizer":
            way = "use ZeRO-1 or ZeRO-2 (without data_types.grad_accum_dtype and zenflow), or FSDP2"
            raise ValueError(f"DeepSpeed's {type(zero).__name__} is not supported: {way}")
        if method.overrides("make_optimizer"):
            why = "makes its own optimizer of whole weights, and DeepSpeed ZeRO optimizes flat pieces of them"
            raise ValueError(f"method {method.name!r} {why}; use DDP or FSDP2")
        self.zero = zero
        self.optimizer: Any = self  # methods read its param_groups

    @property
    def param_groups(self) -> list[Group]:
        """The groups of the optimizer below, with the model's Parameters; within its step, the group that it takes."""
        owners = zip(self.zero.single_partition_of_fp32_groups, self.zero.bit16_groups)
        parameters = {id(flat): held for flat, held in owners}
        return [group | {"params": parameters[id(group["params"][0])]} for group in self.zero.optimizer.param_groups]

    def pieces(self, weights: Mapping[str, SparseWeight], mask: Callable[[str], Tensor]) -> list[Piece]:
        """Within a step of the optimizer below, this process's pieces of the weights whose gradients it uses."""
        (group,), (held,) = self.zero.optimizer.param_groups, self.param_groups
        ids, pieces = {id(parameter) for parameter in held["params"]}, []
        for name, weight in first_of_each(weights).items():
            parameter: Any = weight.parameter
            # DeepSpeed says in `_hp_mapping` where it has put this process's piece, if there is one.
            if id(weight.master) in ids and parameter._hp_mapping is not None:
                pieces.append(_piece(name, weight, parameter._hp_mapping, group["params"][0], group["lr"]))
        return pieces

    def follow(self, before: Callable[[], None], change: Callable[[], None], after: Callable[[], None]) -> list[Self]:
        """Call `before` and `after` around each step, and `change` when the gradients of a group are final. A step that
        ZeRO skips because gradients have overflowed does not count. ZeRO's optimizer has no hooks, so its `step` is
        replaced until `remove`, which the returned object has."""
        zero, take_step, has_begun = self.zero, self.zero.step, False

        def before_group(*_: object) -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                before()
            change()

        def step(*args: object, **kwargs: object) -> object:
            nonlocal has_begun
            has_begun = False
            result = take_step(*args, **kwargs)
            if has_begun:
                after()
            return result

        self._handle, self._step = zero.optimizer.register_step_pre_hook(before_group), step
        zero.step = step
        return [self]

    def remove(self) -> None:
        """Stop following; a second call does nothing, as with torch's handles."""
        self._handle.remove()
        if self.zero.step is self._step:
            del self.zero.step


def _piece(name: str, weight: SparseWeight, mapping: Any, flat: Tensor, learning_rate: float) -> Piece:
    """This process's fp32 piece of a weight, in the piece `flat` of its group, whose gradient is final."""
    in_weight, in_flat = mapping.lp_fragment_address, mapping.hp_fragment_address

    def mask() -> Tensor:
        # Never packed: a piece may begin within a byte. On the CPU where the optimizer is offloaded.
        return weight.mask().flatten().narrow(0, in_weight.start, in_weight.numel).to(flat.device)

    values, gradient = (x.detach().narrow(0, in_flat.start, in_flat.numel) for x in (flat, cast(Tensor, flat.grad)))
    return Piece(name, values, gradient, learning_rate, mask)
