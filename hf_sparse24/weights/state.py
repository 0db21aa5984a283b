"""WeightState: the tensors that a method keeps for a weight, in the weight's module."""

import math
from collections.abc import Iterator, Mapping
from typing import cast

from torch import Tensor, nn

from . import sharding
from .storage import Storage


class WeightState(Mapping[str, Tensor]):
    """The method's buffers by name, such as S-STE's `scale`; those of a stack have a row for each matrix. A weight that
    was patched on the meta device is not ready until it has state."""

    def __init__(self, storage: Storage):
        self.storage = storage
        self.names: tuple[str, ...] = ()
        self.parameter_names: tuple[str, ...] = ()
        self.is_ready = True

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise KeyError(name)
        return getattr(self.storage.module, self.storage.attribute(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def sources(self) -> list[Tensor]:
        """What encodings are made from: the Parameter as its module has it, and this process's parts of the buffers."""
        buffers, attribute = self.storage.module._buffers, self.storage.attribute
        held = [cast(Tensor, buffers[attribute(name)]) for name in self.names]
        return [self.storage.parameter, *[sharding.local(x) if sharding.is_sharded(x) else x for x in held]]

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The method's own trainable tensors, by name."""
        return {name: getattr(self.storage.module, self.storage.attribute(name)) for name in self.parameter_names}

    def in_model(self, name: str) -> dict[str, Tensor]:
        """Buffers and Parameters by their names in a model, where the weight is `name`."""
        prefix = name.removesuffix(self.storage.name)
        return {prefix + self.storage.attribute(key): x for key, x in ({**self} | self.parameters).items()}

    def add(self, state: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter], method: str) -> None:
        """Give the module these buffers and Parameters of a method, all or none."""
        module, attribute = self.storage.module, self.storage.attribute
        for key in (*state, *parameters):
            if hasattr(module, attribute(key)):
                taken = f"{type(module).__name__} has an attribute {attribute(key)!r}"
                raise ValueError(f"method {method!r} keeps {key!r} for a weight, and {taken}: give it another name")
        self.names, self.parameter_names = tuple(state), tuple(parameters)
        for key, tensor in state.items():
            module.register_buffer(attribute(key), tensor)
        for key, parameter in parameters.items():
            module.register_parameter(attribute(key), parameter)

    def remove(self) -> None:
        for name in (*self.names, *self.parameter_names):
            delattr(self.storage.module, self.storage.attribute(name))
        self.names = self.parameter_names = ()

    def set(self, state: Mapping[str, Tensor], method: str) -> None:
        if unknown := sorted(set(state) - set(self.names)):
            raise ValueError(f"method {method!r} has no state {unknown}; it has {list(self.names)}")
        for name, tensor in state.items():
            self.storage.module._buffers[self.storage.attribute(name)] = tensor

    def splits(self, m: int) -> dict[str, Tensor]:
        """With tensor parallelism, the parts of the buffers that belong to this process's part of the weight."""
        storage = self.storage
        if not storage.is_split:
            return {}
        if self.parameter_names:
            trained = list(self.parameter_names)
            way = "use DDP or FSDP2, or settings of the method without them"
            raise ValueError(f"tensor parallelism does not split {trained}, which train with {storage.name}; {way}")
        if storage.cuts_groups(m):
            out, inputs = storage.sizes
            need = f"each process needs a multiple of {math.lcm(m, 8)} of the {inputs} inputs"
            way = "take fewer processes, or leave the layer dense with exclude_modules"
            size = f"{storage.name} [{out}, {inputs}]"
            raise ValueError(f"tensor parallelism splits {size} within groups of {m} or bytes of masks: {need}; {way}")
        return {name: sharding.split_like(x, storage.master) for name, x in self.items() if not sharding.is_sharded(x)}
