"""WeightState: a weight with what a method keeps beside it: buffers such as masks and scales, and Parameters.

A method sees matrices: those of a stack of experts one by one, each with a state of its own.
"""

import math
from collections.abc import Mapping
from typing import Any, Self

import torch
from sparse24_kernels import Pattern
from torch import Tensor, nn

from . import sharding
from .place import WeightPlace
from .view import WeightRun, WeightView


class WeightState(WeightPlace):
    """A place under a method. `attach` makes one.

    Attributes:
        run: shared by all weights of a model: the method, the phase, the open step.
        pattern: N:M of this weight.
        state_names, parameter_names: of the method's buffers and Parameters beside this weight.
        state_is_ready: False for a weight that was patched on the meta device, until it has state.
    """

    def __init__(self, module: nn.Module, name: str, input_dim: int, run: WeightRun, pattern: Pattern | None = None):
        super().__init__(module, name, input_dim)
        self.run = run
        self.pattern: Pattern = pattern or run.method.pattern
        self.state_names: tuple[str, ...] = ()
        self.parameter_names: tuple[str, ...] = ()
        self.state_is_ready = True

    @classmethod
    def attach(
        cls, module: nn.Module, name: str, input_dim: int, run: WeightRun, pattern: Pattern | None = None
    ) -> Self:
        """Put the Parameter `name` of `module` under a method, with `pattern` or that of the run: its state becomes
        buffers of the module, computed from the weight as it is (on the meta device they wait for `init_state` or a
        checkpoint)."""
        weight = cls(module, name, input_dim, run, pattern)
        with torch.no_grad():
            state = weight._fresh_state()
            beside = weight._fresh_parameters(state)
            trains = weight.parameter.requires_grad  # below adapters nothing does
            parameters = {key: nn.Parameter(x, requires_grad=trains) for key, x in beside.items()}
        # Everything that can fail comes before the first change.
        for key in (*state, *parameters):
            if hasattr(module, weight.attribute(key)):
                raise ValueError(
                    f"method {run.method.name!r} keeps {key!r} beside a weight, and {type(module).__name__} has an "
                    f"attribute {weight.attribute(key)!r} already; give it another name"
                )
        weight.state_names, weight.parameter_names = tuple(state), tuple(parameters)
        for key, tensor in state.items():
            module.register_buffer(weight.attribute(key), tensor)
        for key, parameter in parameters.items():
            module.register_parameter(weight.attribute(key), parameter)
        weight.state_is_ready = not (state and weight.parameter.is_meta)
        module.__dict__.setdefault("sparse24", {})[name] = weight
        return weight

    @torch.no_grad()
    def detach(self, result: Tensor | None = None) -> None:
        """Undo `attach`, with `result` written into the Parameter, or the master weight left as it is."""
        if result is not None:
            self.parameter.copy_(result)
        for name in self.state_names:
            del self.module._buffers[self.attribute(name)]
        for name in self.parameter_names:
            del self.module._parameters[self.attribute(name)]
        del self.module.__dict__["sparse24"][self.name]
        if not self.module.__dict__["sparse24"]:
            del self.module.__dict__["sparse24"]

    @property
    def method(self) -> Any:
        """The method, with its settings as they are now and the pattern of this weight."""
        return self.run.method_of(self.pattern)

    @property
    def state(self) -> dict[str, Tensor]:
        """The method's buffers by name, such as S-STE's `scale`; those of a stack have a row for each matrix."""
        return {name: getattr(self.module, self.attribute(name)) for name in self.state_names}

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The method's own trainable tensors beside this weight, by name."""
        return {name: getattr(self.module, self.attribute(name)) for name in self.parameter_names}

    def beside(self, name: str) -> dict[str, Tensor]:
        """The method's buffers and Parameters of this weight by their names in a model, where the weight is `name`."""
        prefix = name.removesuffix(self.name)
        return {prefix + self.attribute(key): tensor for key, tensor in (self.state | self.parameters).items()}

    def views(self, parameter: Tensor | None = None) -> list[WeightView]:
        """The matrices of the weight with their state, one unless it is a stack; or those of another `parameter` of its
        layout. Where the weight is sharded, every process gathers it, and all must call this.

        Within the forward pass of a tensor-parallel layer: the part of both that this process computes with.
        """
        values = self.parameter if parameter is None else parameter
        part = sharding.whole if sharding.is_sharded(values) else sharding.local
        return self.matrices(part(values), {name: part(tensor) for name, tensor in self.state.items()})

    @torch.no_grad()
    def init_state(self) -> None:
        """Compute the method's state from the weight as it is now."""
        self.set_state(self._fresh_state())
        self.split_state()
        self.state_is_ready = True

    @torch.no_grad()
    def init_parameters(self) -> None:
        """Set the method's own Parameters to what they start with, computed from the weight as it is now."""
        for name, tensor in self._fresh_parameters(self.state).items():
            self.parameters[name].copy_(tensor)

    def split_state(self) -> None:
        """With tensor parallelism, keep the part of the state that belongs to this process's part of the weight.

        Raises:
            ValueError: the split cuts groups, or the method has Parameters of its own, which nobody splits.
        """
        if not self.is_split:
            return
        if self.parameter_names:
            raise ValueError(
                f"method {self.method.name!r} trains tensors {list(self.parameter_names)} beside {self.name}, which "
                f"tensor parallelism does not split; use DDP or FSDP2, or settings of the method without them"
            )
        (out, inputs), m = self.sizes, self.method.pattern.m
        if self.cuts_groups(m):
            raise ValueError(
                f"tensor parallelism splits the weight {self.name} [{out}, {inputs}] so that groups of {m}, or bytes "
                f"of packed masks, lie in two processes: each needs a multiple of {math.lcm(m, 8)} of the {inputs} "
                f"inputs; take fewer processes, or leave the layer dense with exclude_modules"
            )
        self.set_state({name: self.split(x) for name, x in self.state.items() if not sharding.is_sharded(x)})

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Give it another state, such as masks that were found elsewhere.

        Raises:
            ValueError: a name that the method's first state did not have.
        """
        unknown = sorted(set(state) - set(self.state_names))
        if unknown:
            known = list(self.state_names)
            raise ValueError(f"method {self.method.name!r} has no state {unknown}; it has {known}")
        for name, tensor in state.items():
            self.module._buffers[self.attribute(name)] = tensor

    def matrices(self, values: Tensor, state: dict[str, Tensor]) -> list[WeightView]:
        """Views of `values` and `state` in place of the weight's own: one, or one for each matrix of a stack."""
        dim = 1 if self.input_dim == -1 else 0
        if not self.is_stack:
            return [WeightView(values, dim, state)]
        return [WeightView(matrix, dim, {k: x[i] for k, x in state.items()}) for i, matrix in enumerate(values)]

    def _fresh_state(self) -> dict[str, Tensor]:
        states = [self.method.init_state(view, *self.run.progress) for view in self.views()]
        return {name: self.stacked([state[name] for state in states]) for name in states[0]}

    def _fresh_parameters(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        views = self.matrices(sharding.whole(self.parameter), {key: sharding.whole(x) for key, x in state.items()})
        made = [self.method.init_parameters(view) for view in views]
        return {name: self.stacked([parameters[name] for parameters in made]) for name in made[0]}

    def stacked(self, tensors: list[Tensor]) -> Tensor:
        """What belongs to each matrix as what belongs to the weight."""
        return torch.stack(tensors) if self.is_stack else tensors[0]
