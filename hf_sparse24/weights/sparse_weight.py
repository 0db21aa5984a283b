"""SparseWeight: one weight under a method: where it lives, its layout, its state, its encodings.

The library speaks of weights, not of layers: a weight is a Parameter of some module, by name, in which groups run along
one of the last two dimensions. A stack of experts `[experts, out, in]` is one weight, and a method sees its matrices
one by one: each is pruned as it would be alone, with a state of its own.

Where FSDP2 shards a weight, the Parameter is a DTensor, and three things differ:

- State (masks, scales) is computed from the whole weight, which every process gathers for it, so it is the same on all
  of them, and shards may begin within a group or a tile.
- FSDP2 gathers the weight for forward and backward and frees it in between. Encodings of it would stay, so none is
  kept: the backward pass makes its own from the weight that FSDP2 gathers again.
- What updates weights (masked decay, optimizers) works on the part that this process holds, `local_views`.

With tensor parallelism a process computes with its part of a weight alone. The state comes from the whole weight too,
and is split as the weight is, so a part must hold whole groups.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sparse24_kernels as kernels
import torch
from torch import Tensor, nn

from . import sharding
from .encodings import Encodings, Forms, RunState, Wanted
from .gemms import MASTER, PRUNED
from .view import WeightConfig, WeightMethod, WeightView

_OF_STORED = {"compressed": "compressed-transposed", "compressed-transposed": "compressed", "dense": "dense"}
"""Forms of a weight `[out, in]` by the forms of its transpose, as which it may be stored."""


class SparseWeight:
    """One weight under a method. `attach` makes one; `sparse_weights(model)` finds them.

    Attributes:
        module, name: the Parameter is `module._parameters[name]`: the dense master weight.
        input_dim: which of its dimensions is the input dimension, -1 or -2.
        config: shared by all weights of a model; with the method, the run state and the backend of the GEMMs.
        state_names, parameter_names: of the method's buffers and Parameters beside this weight.
        state_is_ready: False for a weight that was patched on the meta device, until it has state.
        gathered_from: with FSDP2, the DTensor that optimizers update, once a pass has gathered it. None otherwise.
        is_split: whether tensor parallelism lets this process compute with its part of the weight, so that it keeps
            that part of the state.
        rng_key: int64 0-d tensor that fixes the draw of MVUE in this weight's layer; None draws anew every time.
    """

    def __init__(self, module: nn.Module, name: str, input_dim: int, config: WeightConfig):
        self.module, self.name, self.input_dim, self.config = module, name, input_dim, config
        self.state_names: tuple[str, ...] = ()
        self.parameter_names: tuple[str, ...] = ()
        self.state_is_ready = True
        self.gathered_from: Tensor | None = None
        self.is_split = False
        self.rng_key: Tensor | None = None
        self.encodings = Encodings()

    @classmethod
    def attach(cls, module: nn.Module, name: str, input_dim: int, config: WeightConfig) -> "SparseWeight":
        """Put the Parameter `name` of `module` under a method: its state becomes buffers of the module, computed from
        the weight as it is (on the meta device they wait for `init_state` or a checkpoint)."""
        weight = cls(module, name, input_dim, config)
        method = weight.method
        with torch.no_grad():
            states = [method.init_state(view) for view in weight.views()]
            views = [view._replace(state=state) for view, state in zip(weight.views(), states)]
            state = weight._stacked(states)
            beside = weight._stacked([method.init_parameters(view) for view in views])
            parameters = {key: nn.Parameter(x) for key, x in beside.items()}
        # Everything that can fail comes before the first change.
        for key in (*state, *parameters):
            if hasattr(module, weight.attribute(key)):
                raise ValueError(
                    f"method {method.name!r} keeps {key!r} beside a weight, and {type(module).__name__} has an "
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
    def method(self) -> WeightMethod:
        return self.config.bound_method

    @property
    def run_state(self) -> RunState:
        return self.config.run_state

    # Where it lives.

    @property
    def parameter(self) -> Tensor:
        """The dense master weight as the module has it now. While FSDP2 or tensor parallelism runs the module, a plain
        tensor: the whole weight, or this process's part; otherwise the Parameter, which is a DTensor with both."""
        stored = self.module._parameters.get(self.name, self.module.__dict__.get(self.name))
        if stored is None:  # DataParallel's replicas have it in their __dict__
            raise RuntimeError(
                f"{self.name} is no Parameter of {type(self.module).__name__} any more: something has replaced it, "
                f"such as a parametrization or PEFT's target_parameters; call unpatch_model(model) before that"
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

    def attribute(self, name: str) -> str:
        """What the module calls a buffer or Parameter that the method keeps beside this weight."""
        # Transformers splits what is called `...experts.gate_up_proj` for a file, and older versions whatever begins
        # like that, so the name goes last.
        return name if self.name == "weight" else f"{name}_of_{self.name}"

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

    @property
    def is_stack(self) -> bool:
        """Whether it is a stack of matrices, such as those of experts."""
        return self.parameter.dim() > 2

    @property
    def sizes(self) -> tuple[int, int]:
        """(out, in) of the weight, or of each matrix in a stack, however it is stored."""
        rows, columns = self.parameter.shape[-2:]
        return (rows, columns) if self.input_dim == -1 else (columns, rows)

    def views(self, parameter: Tensor | None = None) -> list[WeightView]:
        """The whole weight, with its state, or each matrix of a stack; or another Parameter of its layout in its place.
        Within the forward pass of a tensor-parallel layer, the part of both that this process computes with.

        The list has one entry for a weight that is a matrix. Where the weight is sharded, every process gathers it, and
        all must ask.
        """
        values = self.parameter if parameter is None else parameter
        part = sharding.whole if sharding.is_sharded(values) else sharding.local
        return self._views(part(values), {name: part(tensor) for name, tensor in self.state.items()})

    def local_views(self) -> list[WeightView]:
        """What this process updates of the weight, with that part of the state: all where the weight is not sharded.
        The list is empty where the process has nothing of it."""
        master, state = self.master, self.state
        if not sharding.is_sharded(master):
            return self.views()
        matrix = sharding.local(master)
        if not matrix.numel():
            return []
        if not self.is_split:
            state = {name: self._split(tensor) for name, tensor in state.items()}
        return self._views(matrix, {name: sharding.local(x).to(matrix.device) for name, x in state.items()})

    def _views(self, values: Tensor, state: dict[str, Tensor]) -> list[WeightView]:
        dim = 1 if self.input_dim == -1 else 0
        if not self.is_stack:
            return [WeightView(values, dim, state)]
        return [WeightView(matrix, dim, {k: x[i] for k, x in state.items()}) for i, matrix in enumerate(values)]

    def _split(self, state: Tensor) -> Tensor:
        """State as the weight is split: what has its dimensions, as packed masks have, goes with it; what is a number
        for a matrix, as a scale is, belongs to all parts."""
        return sharding.split_like(state, self.master, state.dim() == self.master.dim())

    @property
    def cuts_groups(self) -> bool:
        """Whether it is sharded so that a group along the input dimension, or a byte of its packed mask, lies in two
        processes."""
        m = self.method.pattern.m
        return sharding.cuts(self.master, self.input_dim, m) or sharding.cuts(self.master, -1, math.lcm(m, 8))

    def view(self) -> WeightView:
        """That of a weight that is one matrix."""
        (view,) = self.views()
        return view

    # Its state.

    @torch.no_grad()
    def init_state(self) -> None:
        """Compute the method's state from the weight as it is now."""
        self.set_state(self._stacked([self.method.init_state(view) for view in self.views()]))
        self.split_state()
        self.state_is_ready = True

    def split_state(self) -> None:
        """With tensor parallelism, keep the part of the state that belongs to this process's part of the weight.

        Raises:
            ValueError: the split cuts groups.
        """
        if not self.is_split:
            return
        if self.cuts_groups:
            (out, inputs), m = self.sizes, self.method.pattern.m
            raise ValueError(
                f"tensor parallelism splits the weight {self.name} [{out}, {inputs}] so that groups of {m}, or bytes "
                f"of packed masks, lie in two processes: each needs a multiple of {math.lcm(m, 8)} of the {inputs} "
                f"inputs; take fewer processes, or leave the layer dense with exclude_modules"
            )
        self.set_state({name: self._split(x) for name, x in self.state.items() if not sharding.is_sharded(x)})

    @torch.no_grad()
    def init_parameters(self) -> None:
        """Set the method's own Parameters to what they start with, computed from the weight as it is now."""
        made = self._stacked([self.method.init_parameters(view) for view in self.views()])
        for name, tensor in made.items():
            self.parameters[name].copy_(tensor)

    def set_state(self, state: dict[str, Tensor]) -> None:
        """Give it another state, such as masks that were found elsewhere.

        Raises:
            ValueError: a name that the method's first state did not have.
        """
        unknown = sorted(set(state) - set(self.state_names))
        if unknown:
            raise ValueError(f"method {self.method.name!r} has no state {unknown}; it has {list(self.state_names)}")
        for name, tensor in state.items():
            self.module._buffers[self.attribute(name)] = tensor

    @torch.no_grad()
    def wrong_state(self) -> str | None:
        """What is wrong with the state, where the method cannot have made it; None too while there is no data."""
        if self.parameter.is_meta or not self.state_is_ready:
            return None
        for name, found in self.state.items():
            if self.is_stack and found.shape[:1] != self.parameter.shape[:1]:
                return f"{name} is of shape {tuple(found.shape)}, not one for each of {len(self.parameter)} experts"
        without_data = torch.empty(self.parameter.shape, dtype=self.parameter.dtype, device="meta")
        views = self._views(without_data, {name: sharding.whole(tensor) for name, tensor in self.state.items()})
        for name, made in self._stacked([self.method.init_state(view) for view in views]).items():
            found = self.state[name]
            both_float = made.is_floating_point() and found.is_floating_point()  # in files, of any precision
            if found.shape != made.shape or not (both_float or found.dtype == made.dtype):
                return f"{name} is {found.dtype} {tuple(found.shape)}, not {made.dtype} {tuple(made.shape)}"
        reasons = ((i, self.method.check_state(view)) for i, view in enumerate(views))
        wrong = next(((i, reason) for i, reason in reasons if reason), None)
        if wrong is None:
            return None
        return f"expert {wrong[0]}: {wrong[1]}" if self.is_stack else wrong[1]

    @torch.no_grad()
    def mask(self, packed: bool = False) -> Tensor:
        """Which entries the method keeps now: bool, the weight's shape, or packed bits along the last dimension.

        Where the weight is sharded, every process gathers it, and all must ask.
        """
        return self._of_each(lambda view: self.method.mask(view, packed))

    @torch.no_grad()
    def local_mask(self, packed: bool = False) -> Tensor:
        """The same for what this process updates of the weight. All processes must ask."""
        if not sharding.is_sharded(self.master):
            return self.mask(packed)
        if not self.method.mask_is_local or self.cuts_groups:
            mask = sharding.local(sharding.split_like(self.mask(), self.master))
            mask = mask.to(sharding.local(self.master).device)
            return kernels.pack_bits(mask) if packed else mask
        masks = [self.method.mask(view, packed) for view in self.local_views()]
        if not masks:
            return torch.zeros(0, dtype=torch.uint8 if packed else torch.bool)
        return torch.stack(masks) if self.is_stack else masks[0]

    @torch.no_grad()
    def fresh_mask(self, parameter: Tensor) -> Tensor:
        """The mask, as packed bits, that another weight like this one asks for, whatever mask its state holds."""

        def fresh(view: WeightView) -> Tensor:
            return self.method.mask(view._replace(state=self.method.init_state(view)), True)

        return self._of_each(fresh, parameter)

    # Its encodings.

    @torch.no_grad()
    def pruned(self, dtype: torch.dtype | None = None) -> Tensor:
        """The N:M weight that stands for the master weight: its shape and layout, never -0.0.

        Exactly N:M along the input dimension: at most N of every M are non-zero. `dtype` is that of the result, by
        default the master's; what is kept never depends on it.
        """
        return self._pruned_to(PRUNED, dtype or self.parameter.dtype)

    def kept_pruned(self, tokens: int) -> Tensor:
        """The weight operand of the output GEMM as `pruned` gives it, kept as `encodings.py` says; for code that
        multiplies by it itself, so many tokens at once."""
        dtype, wanted = self.parameter.dtype, Wanted(self.method.gemms.output.weight or PRUNED, "dense", None)
        (dense,) = self._kept([wanted], dtype, tokens, lambda operand, forms: [self._pruned_to(operand, dtype)])
        return dense

    @torch.no_grad()
    def _pruned_to(self, operand: str, dtype: torch.dtype) -> Tensor:
        """A weight operand in the shape and layout of the Parameter."""
        self.check_state()
        check_sharding(self.name, self.master)
        return self._of_each(lambda view: self.method.prune(view, operand, {"dense": None}, dtype)[0])

    def encoded(self, wanted: Sequence[Wanted], dtype: torch.dtype, tokens: int) -> list[Tensor]:
        """Weight operands `[out, in]` in forms that GEMMs of so many tokens take, kept as `encodings.py` says."""
        return self._kept(wanted, dtype, tokens, lambda operand, forms: self._encode(operand, forms, dtype))

    def _kept(
        self,
        wanted: Sequence[Wanted],
        dtype: torch.dtype,
        tokens: int,
        make: Callable[[str, Forms], Sequence[Tensor]],
    ) -> list[Tensor]:
        made_from = [self.parameter, *(sharding.local(tensor) for tensor in self.state.values())]
        if sharding.is_sharded(self.parameter):
            raise ValueError(
                f"{self.name} is a DTensor while its layer computes, as torch's parallelize_module leaves it, and "
                f"older versions of Transformers do; split the model by FSDP2 (fully_shard), or by "
                f"from_pretrained(tp_plan='auto') of Transformers 5.23"
            )
        keep = self.gathered_from is None  # FSDP2 frees what they would be valid for
        return self.encodings.get(wanted, dtype, made_from, tokens, self.run_state, make, keep)

    @torch.no_grad()
    def _encode(self, operand: str, forms: Forms, dtype: torch.dtype) -> list[Tensor]:
        self.check_state()
        check_sharding(self.name, self.master)
        view = self.view()
        if operand == MASTER:
            return [(view.matrix if view.dim == 1 else view.matrix.t()).to(dtype)]
        if view.dim == 1:
            return list(self.method.prune(view, operand, forms, dtype))
        stored = {_OF_STORED[form]: compression for form, compression in forms.items()}
        made = self.method.prune(view, operand, stored, dtype)
        return [tensor.t() if form == "dense" else tensor for form, tensor in zip(forms, made)]

    def clear_encodings(self) -> None:
        """Drop what is kept, and free its memory: the next GEMM encodes anew."""
        self.encodings.clear()

    def check_state(self) -> None:
        """Raise RuntimeError where the weight cannot be pruned yet."""
        if not self.state_is_ready:
            raise RuntimeError(
                "this layer was patched on the meta device and has no state yet; load a checkpoint into the model, or "
                "call init_state() on each of hf_sparse24.sparse_weights(model).values() once they have weights"
            )

    # Copies.

    def rebound(self, module: nn.Module) -> "SparseWeight":
        """The same for a replica of the module, which has a weight of its own on another device."""
        replica = copy.copy(self)
        replica.module, replica.encodings = module, Encodings()
        return replica

    def __deepcopy__(self, memo: dict[int, Any]) -> "SparseWeight":
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        copied.rng_key = None  # its controller's
        return copied

    def _of_each(self, function: Callable[[WeightView], Tensor], parameter: Tensor | None = None) -> Tensor:
        """What a function gives for the weight, or for each matrix of a stack, in the shape of the Parameter."""
        results = [function(view) for view in self.views(parameter)]
        return torch.stack(results) if self.is_stack else results[0]

    def _stacked(self, states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """What belongs to each matrix as what belongs to the weight."""
        if not self.is_stack:
            return states[0]
        return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def wrong_states(weights: Mapping[str, SparseWeight]) -> str | None:
    """What is wrong with the state of the first few weights where something is; None where nothing is."""
    wrong = [f"{name}: {reason}" for name, weight in weights.items() if (reason := weight.wrong_state())]
    return "; ".join(wrong[:5]) or None


def check_sharding(name: str, parameter: Tensor) -> None:
    """Raise ValueError where the weight `name` is split in a way that it cannot be trained in."""
    reason = sharding.unsupported(parameter)
    if reason:
        raise ValueError(f"{name} is {reason}")


def check_whole(name: str, parameter: Tensor) -> None:
    """Raise ValueError where a process holds only a part of the weight `name`, with what has split it."""
    check_sharding(name, parameter)
    if sharding.is_sharded(parameter):
        raise ValueError(f"{name} is a DTensor, sharded by FSDP2 or tensor parallelism; do this before sharding")


def sparse_weights(model: nn.Module) -> dict[str, SparseWeight]:
    """The sparse weights of `model` by the Parameter's name, in module order; modules that are shared count once."""
    return {
        f"{prefix}.{name}" if prefix else name: weight
        for prefix, module in model.named_modules()
        for name, weight in module.__dict__.get("sparse24", {}).items()
    }


def layer_name(name: str) -> str:
    """The layer that a weight is named after, as `target_modules` and `exclude_modules` take it."""
    return name.removesuffix(".weight")


def first_of_each(weights: Mapping[str, SparseWeight]) -> dict[str, SparseWeight]:
    """Without those that share an earlier one's Parameter: a gradient is decayed once, a number counted once."""
    first: dict[int, str] = {}
    for name, weight in weights.items():
        first.setdefault(id(weight.master), name)
    return {name: weights[name] for name in first.values()}
