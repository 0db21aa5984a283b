"""WeightPlace: where a weight lives: in which module, in which layout, and which part of it this process holds."""

import math
from typing import cast

from torch import Tensor, nn

from . import sharding


class WeightPlace:
    """The Parameter `name` of a module, in which groups of M run along one of the last two dimensions.

    A stack of experts `[experts, out, in]` is one weight too.

    Attributes:
        module, name: the Parameter is `module._parameters[name]`: the dense master weight.
        input_dim: which of its dimensions is the input dimension, -1 or -2.
        gathered_from: with FSDP2, the DTensor that optimizers update, once a pass has gathered it. None otherwise.
        is_split: whether tensor parallelism lets this process compute with its part of the weight alone.
    """

    def __init__(self, module: nn.Module, name: str, input_dim: int):
        self.module, self.name, self.input_dim = module, name, input_dim
        self.gathered_from: Tensor | None = None
        self.is_split = False

    @property
    def parameter(self) -> Tensor:
        """The dense master weight as the module has it now. While FSDP2 or tensor parallelism runs the module, a plain
        tensor: the whole weight, or this process's part; otherwise the Parameter, which is a DTensor with both."""
        stored = self.module._parameters.get(self.name)
        if stored is None:
            raise RuntimeError(
                f"{self.name} is no Parameter of {type(self.module).__name__} any more: something has replaced it, "
                f"such as a parametrization or PEFT's target_parameters (call unpatch_model(model) before that), or "
                f"FSDP1 (use FSDP2, fully_shard)"
            )
        return stored

    @property
    def master(self) -> Tensor:
        """The Parameter that optimizers update."""
        return self.parameter if self.gathered_from is None else self.gathered_from

    @property
    def bias(self) -> Tensor | None:
        """The bias of a linear layer."""
        return getattr(self.module, "bias", None)

    @property
    def is_stack(self) -> bool:
        """Whether it is a stack of matrices, such as those of experts."""
        return self.parameter.dim() > 2

    @property
    def sizes(self) -> tuple[int, int]:
        """(out, in) of the weight, or of each matrix in a stack, however it is stored."""
        rows, columns = self.parameter.shape[-2:]
        return (rows, columns) if self.input_dim == -1 else (columns, rows)

    def attribute(self, key: str) -> str:
        """What the module calls a tensor that is kept beside this weight."""
        # Transformers splits what is called `...experts.gate_up_proj` for a file, and older versions whatever begins
        # like that, so the weight's name goes last.
        return key if self.name == "weight" else f"{key}_of_{self.name}"

    def out_in(self, stored: Tensor) -> Tensor:
        """A matrix or a stack in the layout of the Parameter as `[..., out, in]`, or the other way round: a view."""
        return stored if self.input_dim == -1 else stored.transpose(-1, -2)

    def split(self, beside: Tensor) -> Tensor:
        """A tensor kept beside the weight, sharded as the weight is: what has the weight's dimensions, as packed masks
        have, goes with it; a number for each matrix, as a scale is, belongs to all parts."""
        return sharding.split_like(beside, self.master, beside.dim() == self.master.dim())

    def cuts_groups(self, m: int) -> bool:
        """Whether it is sharded so that a group of `m`, or a byte of its packed mask, lies in two processes."""
        return sharding.cuts(self.master, self.input_dim, m) or sharding.cuts(self.master, -1, math.lcm(m, 8))


def named_weights(model: nn.Module, key: str) -> dict[str, "WeightPlace"]:
    """The weights that modules of `model` keep under the attribute `key`, by the Parameter's whole name, in module
    order; modules that are shared count once."""
    return {
        f"{prefix}.{name}" if prefix else name: weight
        for prefix, module in model.named_modules()
        for name, weight in cast(dict[str, WeightPlace], module.__dict__.get(key, {})).items()
    }


def layer_name(name: str) -> str:
    """The layer that a weight is named after, as `target_modules` and `exclude_modules` take it."""
    return name.removesuffix(".weight")
