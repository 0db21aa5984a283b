"""Storages: how a module keeps an N:M weight. What differs between them stands here alone.

| storage        | tensors of the module                                      | what trains                     |
|----------------|------------------------------------------------------------|---------------------------------|
| `DenseMaster`  | the Parameter `weight`                                     | all of it; a method prunes it   |
| `PackedMaster` | the Parameter `packed_weight_values`, a buffer of the mask | the kept values; the mask stays |
| `PackedFrozen` | buffers of values, mask and (int8 values) scales           | nothing                         |
"""

import math
from typing import ClassVar, NamedTuple, cast

import sparse24_kernels as kernels
import torch
from sparse24_kernels import Packed, Pattern
from torch import Tensor, nn

from ..packed_format import buffer_names
from . import sharding


class WeightView(NamedTuple):
    """A weight as a method sees it: one matrix, or one of a stack, and its state.

    Attributes:
        matrix: `[rows, columns]`, the dense master weight as it is stored: `[out, in]`, or `[in, out]` in GPT-2's
            `Conv1D`. Without gradients, and never to be written to.
        dim: the dimension of `matrix` that is the input dimension, 0 or 1. Groups of M lie along it.
        state: what the method remembers of this weight, by name.
        layer, number: the layer, and which matrix of a stack; see `name`.
    """

    matrix: Tensor
    dim: int
    state: dict[str, Tensor]
    layer: str = ""
    number: int | None = None

    # Not a field: torch.compile would make another graph for each name.
    @property
    def name(self) -> str:
        """The layer's name in the model that was patched, to seed random numbers by: `model.layers.0.mlp.up_proj`, of
        a stack `...experts.up_proj[3]`, of a shared weight the first layer's. Without zeros it has none."""
        return self.layer if self.number is None else f"{self.layer}[{self.number}]"


class Storage:
    """A weight `[out, in]`, or a stack of them `[experts, out, in]`, in the module that has it.

    Attributes:
        module, name: the dense weight is, or was, the Parameter `name` of `module`.
        input_dim: which of its dimensions is the input dimension, -1 or -2. Groups of M run along it.
        layer: see `WeightView`.
        gathered_from: with FSDP2, the DTensor that optimizers update, once a pass has gathered it. None otherwise.
        pattern: that its packed form has, if it is stored packed.
        is_split: whether tensor parallelism lets this process compute with its part of the weight alone.
        has_zeros: whether dropped entries are stored too, so that a method can choose other ones.
    """

    pattern: Pattern = Pattern(2, 4)
    has_zeros: ClassVar[bool] = False

    def __init__(self, module: nn.Module, name: str, input_dim: int, layer: str = ""):
        self.module, self.name, self.input_dim, self.layer = module, name, input_dim, layer
        self.gathered_from: Tensor | None = None
        self.is_split = False

    @property
    def master(self) -> Tensor:
        """The tensor that optimizers update, or would update."""
        raise NotImplementedError

    @property
    def parameter(self) -> Tensor:
        """The dense master weight as the module has it now; only of a `DenseMaster`."""
        raise NotImplementedError

    @property
    def packed(self) -> Packed:
        """The values without the zeros, with their mask and scales; only of a `PackedFrozen`."""
        raise NotImplementedError

    @property
    def sizes(self) -> tuple[int, int]:
        """(out, in) of the weight, or of each matrix in a stack, however it is stored."""
        raise NotImplementedError

    def whole(self) -> Tensor:
        """All of the dense weight, without gradients; every process must call it where the weight is sharded."""
        raise NotImplementedError

    @property
    def is_stack(self) -> bool:
        return self.master.dim() > 2

    @property
    def numel(self) -> int:
        """Entries of the dense weight, however many of them are stored."""
        return math.prod(self.sizes) * (len(self.master) if self.is_stack else 1)

    def attribute(self, key: str) -> str:
        """The name in the module of a tensor that is kept for this weight."""
        # Transformers splits what is called `...experts.gate_up_proj` for a file, and older versions whatever begins
        # like that, so the weight's name goes last.
        return key if self.name == "weight" else f"{key}_of_{self.name}"

    def out_in(self, stored: Tensor) -> Tensor:
        """A matrix or a stack in the layout of the Parameter as `[..., out, in]`, or the other way round: a view."""
        return stored if self.input_dim == -1 else stored.transpose(-1, -2)

    def views(self, values: Tensor, state: dict[str, Tensor]) -> list[WeightView]:
        """`values` in the layout of the Parameter, with `state`, as a method sees them: one, or one for each matrix."""
        dim = 1 if self.input_dim == -1 else 0
        if not self.is_stack:
            return [WeightView(values, dim, state, self.layer)]
        return [WeightView(x, dim, {k: s[i] for k, s in state.items()}, self.layer, i) for i, x in enumerate(values)]

    def stacked(self, tensors: list[Tensor]) -> Tensor:
        """Tensors of the matrices as one tensor of the weight."""
        return torch.stack(tensors) if self.is_stack else tensors[0]

    def cuts_groups(self, m: int) -> bool:
        """Whether it is sharded so that a group of `m`, or a byte of its packed mask, lies in two processes."""
        return sharding.cuts(self.master, self.input_dim, m) or sharding.cuts(self.master, -1, math.lcm(m, 8))


class DenseMaster(Storage):
    """The dense weight is a Parameter, from which a method makes the 2:4 weight of the GEMMs."""

    has_zeros = True

    @property
    def parameter(self) -> Tensor:
        """The weight as the module has it now. While FSDP2 or tensor parallelism runs the module, a plain tensor: the
        whole weight, or this process's part; otherwise the Parameter, which is a DTensor with both."""
        stored = self.module._parameters.get(self.name)
        if stored is None:
            by = "a parametrization or PEFT's target_parameters (call unpatch_model before), or FSDP1 (use FSDP2)"
            raise RuntimeError(f"{self.name} is no Parameter of its module any more, replaced by {by}")
        return stored

    @property
    def master(self) -> Tensor:
        return self.parameter if self.gathered_from is None else self.gathered_from

    @property
    def sizes(self) -> tuple[int, int]:
        rows, columns = self.parameter.shape[-2:]
        return (rows, columns) if self.input_dim == -1 else (columns, rows)

    def whole(self) -> Tensor:
        return sharding.whole(self.parameter)


class PackedFrozen(Storage):
    """The weight without its zeros, in buffers: for inference, and under adapters."""

    @property
    def packed(self) -> Packed:
        (_, mask, scales), buffers = buffer_names(self.name), self.module._buffers
        return Packed(self.master, cast(Tensor, buffers[mask]), buffers.get(scales), self.pattern.m)

    @property
    def master(self) -> Tensor:
        return cast(Tensor, getattr(self.module, buffer_names(self.name)[0]))

    @property
    def sizes(self) -> tuple[int, int]:
        rows, kept = self.master.shape[-2:]
        return rows, kept * self.pattern.m // self.pattern.n

    @torch.no_grad()
    def whole_packed(self) -> Packed:
        """The packed form with its values gathered: every process must call it where FSDP2 shards them."""
        packed = self.packed
        return packed._replace(values=sharding.whole(packed.values))

    @torch.no_grad()
    def whole(self) -> Tensor:
        return self.out_in(kernels.unpack_nm(self.whole_packed()))


class PackedMaster(PackedFrozen):
    """The kept values are the Parameter that optimizers update (`master="packed"`)."""


TRAINED = DenseMaster | PackedMaster
"""Storages of weights that a method trains."""
PACKED = PackedFrozen | PackedMaster
"""Storages without a dense master."""


def layer_name(name: str) -> str:
    """The layer that a weight is named after, as `target_modules` and `exclude_modules` take it."""
    return name.removesuffix(".weight")


def name_without_adapters(name: str) -> str:
    """A module's or weight's name without the adapters of PEFT, and without FSDP's wrappers of what is recomputed."""
    name = name.replace(".base_layer", "").replace("_checkpoint_wrapped_module.", "")
    return name.removeprefix("base_model.model.")
