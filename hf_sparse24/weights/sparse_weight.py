"""SparseWeight: one weight under a method: its masks, and the operands of GEMMs that it becomes.

The library speaks of weights, not of layers: a stack of experts is one weight too.

Where FSDP2 shards a weight, every process gathers all of it for its state, which is the same on all of them. FSDP2
gathers the weight for forward and backward and frees it in between, so no encoding is kept: the backward pass makes its
own. What updates weights works on the part that this process holds, and `local_mask`. With tensor parallelism a process
computes with its part alone; the state of the whole weight is split as the weight is, so a part must hold whole groups.
"""

from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, Self, cast

import sparse24_kernels as kernels
import torch
from sparse24_kernels import Pattern
from sparse24_kernels.formats import empty_mask, turned
from sparse24_kernels.gemm.backend import DENSE
from torch import Tensor, nn

from . import sharding
from .encodings import Encodings, Wanted
from .gemms import GRAD_INPUT, MASK, PRUNED
from .rules import check_rule, encode, method_mask
from .state import WeightState
from .storage import DenseMaster, Storage, WeightView


class SparseWeight:
    """One 2:4 weight of a model; `sparse_weights(model)` finds them.

    Attributes:
        storage: how the module keeps it; see `weights/storage.py`.
        module, name, input_dim: see `Storage`.
        run: the `run.SparseRun` that all weights of a model share: the method, the phase, the open step. None where
            the weight is frozen.
        pattern: N:M of this weight.
        state: the tensors that the method keeps for it.
        rng_key: int64 0-d tensor that fixes the draw of MVUE in this weight's layer; None draws another every time.
    """

    def __init__(self, storage: Storage, run: Any, pattern: Pattern | None = None):
        self.storage = storage
        self.module, self.name, self.input_dim = storage.module, storage.name, storage.input_dim
        self.run = run
        self.pattern: Pattern = pattern or (Pattern(2, 4) if run is None else run.method.pattern)
        self.state = WeightState(storage)
        self.rng_key: Tensor | None = None
        self.encodings = Encodings(self)
        self._checked: frozenset[str] = frozenset()  # the operands that were found to be N:M with this state

    @classmethod
    def attach(
        cls, module: nn.Module, name: str, input_dim: int, run: Any, pattern: Pattern | None = None, layer: str = ""
    ) -> Self:
        """Put the Parameter `name` of `module` under a method, with `pattern` or that of the run. On the meta device,
        its state waits for `init_state` or a checkpoint."""
        weight = cls(DenseMaster(module, name, input_dim, layer), run, pattern)
        with torch.no_grad():
            state = _fresh_state(weight)
            fresh, trains = _fresh_parameters(weight, state), weight.parameter.requires_grad  # not below adapters
            parameters = {key: nn.Parameter(x, requires_grad=trains) for key, x in fresh.items()}
        weight.state.add(state, parameters, run.method.name)  # everything that can fail comes before the first change
        weight.state.is_ready = not (state and weight.parameter.is_meta)
        module.__dict__.setdefault("sparse24", {})[name] = weight
        return weight

    @property
    def method(self) -> Any:
        """The method, with its settings as they are now and the pattern of this weight."""
        return self.run.method_of(self.pattern)

    @property
    def parameter(self) -> Tensor:
        """The dense master weight as the module has it now; see `DenseMaster.parameter`."""
        return self.storage.parameter

    @property
    def master(self) -> Tensor:
        """The Parameter that optimizers update."""
        return self.storage.master

    @property
    def sizes(self) -> tuple[int, int]:
        """(out, in) of the weight, or of each matrix in a stack."""
        return self.storage.sizes

    @property
    def is_stack(self) -> bool:
        return self.storage.is_stack

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The method's own trainable tensors for this weight, by name."""
        return self.state.parameters

    def views(self, parameter: Tensor | None = None) -> list[WeightView]:
        """The matrices of the weight, or of another `parameter` of its layout, with their state. All processes must
        call this; a tensor-parallel forward gets the part that this process computes with."""
        values = self.parameter if parameter is None else parameter
        part = sharding.whole if sharding.is_sharded(values) else sharding.local
        return self.storage.views(part(values), {name: part(tensor) for name, tensor in self.state.items()})

    @torch.no_grad()
    def init_state(self, with_parameters: bool = False) -> None:
        """Compute the method's state, and its own Parameters where asked for, from the weight as it is now."""
        self.set_state(_fresh_state(self))
        self.split_state()
        self.state.is_ready = True
        for name, tensor in _fresh_parameters(self, self.state).items() if with_parameters else ():
            self.parameters[name].copy_(tensor)

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        """Give it another state, such as masks that were found elsewhere."""
        self.state.set(state, self.method.name)
        self._checked = frozenset()
        self.clear_encodings()

    def split_state(self) -> None:
        """With tensor parallelism, keep the part of the state that belongs to this process's part of the weight."""
        self.set_state(self.state.splits(self.pattern.m))

    @torch.no_grad()
    def mask(self, packed: bool = False) -> Tensor:
        """Which entries the method keeps now: bool in the weight's shape, or packed bits along the last dimension. All
        processes must call this."""
        return self.storage.stacked([method_mask(self.method, view, packed) for view in self.views()])

    @torch.no_grad()
    def local_mask(self, packed: bool = False) -> Tensor:
        """The mask of what this process updates of the weight. All processes must call this."""
        if not sharding.is_sharded(self.master):
            return self.mask(packed)
        storage, local = self.storage, sharding.local(self.master)
        if not self.method.mask_is_local or storage.cuts_groups(self.pattern.m):
            mask = sharding.local(sharding.split_like(self.mask(), self.master)).to(local.device)
            return kernels.pack_bits(mask) if packed else mask
        if not local.numel():  # there may be more processes than rows
            return empty_mask(local, packed)
        state: dict[str, Tensor] = dict(self.state)
        if not storage.is_split:
            state = {name: sharding.split_like(x, self.master) for name, x in state.items()}
        views = storage.views(local, {name: sharding.local(x).to(local.device) for name, x in state.items()})
        return storage.stacked([method_mask(self.method, view, packed) for view in views])

    @torch.no_grad()
    def pruned(self) -> Tensor:
        """The N:M weight that stands for the master weight: its shape, dtype and layout, never -0.0."""
        (dense,) = self.encode(self.parameter.dtype, [Wanted(PRUNED)])
        return self.storage.out_in(dense)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The one weight that computes what the layer computes, for export and `unpatch_model`: the pruned weight with
        what the method adds to the output; in the dense phase the master."""
        if not self.storage.has_zeros or self.run.is_dense:
            return self.storage.whole()
        parameters = {name: sharding.whole(tensor) for name, tensor in self.parameters.items()}
        out_in = self.storage.out_in
        return out_in(self.method.merge(out_in(self.pruned()), parameters, self.run.phase))

    def encoded(self, wanted: Sequence[Wanted], dtype: torch.dtype) -> list[Tensor]:
        """Weight operands `[..., out, in]` in forms that GEMMs take, kept as `encodings.py` says."""
        if sharding.is_sharded(self.parameter):
            way = "split the model by FSDP2 (fully_shard), or by from_pretrained(tp_plan='auto') of Transformers 5.23"
            raise ValueError(f"{self.name} is a DTensor while its layer computes, as after parallelize_module; {way}")
        return self.encodings.get(wanted, dtype)

    def clear_encodings(self) -> None:
        """Drop what is kept, and free its memory: the next GEMM encodes again. Call it after a write to the weight."""
        self.encodings.clear()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"rng_key": None, "encodings": Encodings(self)}  # its controller's; derived

    @torch.no_grad()
    def encode(self, dtype: torch.dtype, wanted: Sequence[Wanted]) -> list[Tensor]:
        """One operand `[..., out, in]` in the forms that GEMMs take. The first time, checks that it is N:M."""
        if not self.state.is_ready:
            call = "call init_state() on each of hf_sparse24.sparse_weights(model).values() once they have weights"
            raise RuntimeError(f"it was patched on the meta device and has no state yet; load a checkpoint, or {call}")
        sharding.check_supported(self.name, self.master)
        method, operand = self.method, wanted[0].operand
        if operand == MASK:
            return [self.mask(packed=True)]
        checks = operand not in self._checked and not (torch.compiler.is_compiling() or self.parameter.is_meta)
        forms, made = [(one.form, one.backend) for one in wanted], []
        if self.input_dim != -1:  # stored as the transpose
            forms = [(form if backend is DENSE else turned(form), backend) for form, backend in forms]
        for view in self.views():
            rule = method.prune_grad_input(view) if operand == GRAD_INPUT else method.prune(view)
            if checks:
                check_rule(rule, view, method, operand, self.name)
            made.append(encode(rule, view, self.pattern, dtype, forms))
        if checks:
            self._checked |= {operand}
        tensors = [self.storage.stacked(list(each)) for each in zip(*made)]
        return [self.storage.out_in(x) if one.backend is DENSE else x for one, x in zip(wanted, tensors)]


def _fresh_state(weight: SparseWeight, views: Sequence[WeightView] | None = None) -> dict[str, Tensor]:
    states = [weight.method.init_state(view, *weight.run.progress) for view in views or weight.views()]
    return {name: weight.storage.stacked([state[name] for state in states]) for name in states[0]}


def _fresh_parameters(weight: SparseWeight, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    views = weight.storage.views(weight.storage.whole(), {key: sharding.whole(x) for key, x in state.items()})
    made = [weight.method.init_parameters(view) for view in views]
    return {name: weight.storage.stacked([parameters[name] for parameters in made]) for name in made[0]}


@torch.no_grad()
def wrong_state(weight: SparseWeight) -> str | None:
    """The fault of a weight's state; None where it has none, and while there is no data."""
    if weight.parameter.is_meta or not weight.state.is_ready:
        return None
    without_data = torch.empty(weight.parameter.shape, dtype=weight.parameter.dtype, device="meta")
    for name, made in _fresh_state(weight, weight.storage.views(without_data, {})).items():
        found = weight.state[name]
        both_float = made.is_floating_point() and found.is_floating_point()  # in files, of any precision
        if found.shape != made.shape or not (both_float or found.dtype == made.dtype):
            return f"{name} is {found.dtype} {tuple(found.shape)}, not {made.dtype} {tuple(made.shape)}"
    whole = {name: sharding.whole(tensor) for name, tensor in weight.state.items()}
    for index, view in enumerate(weight.storage.views(without_data, whole)):
        if reason := weight.method.check_state(view):
            return f"expert {index}: {reason}" if weight.is_stack else reason
    return None


def wrong_states(weights: Mapping[str, SparseWeight]) -> str | None:
    """The faults of the first few weights whose state has one; None where all are right."""
    wrong = [f"{name}: {reason}" for name, weight in weights.items() if (reason := wrong_state(weight))]
    return "; ".join(wrong[:5]) or None


def sparse_weights(
    model: nn.Module, storage: type[Storage] | UnionType = DenseMaster, every_name: bool = False
) -> dict[str, SparseWeight]:
    """The sparse weights of a model.

    Args:
        model: any model, patched or not.
        storage: which of them, by a class of `hf_sparse24.weights.storage`: those with a dense master weight,
            `TRAINED` all that a method trains, `PACKED` those without a dense master, or all, `Storage`.
        every_name: whether a module that the model has under several names is found under each, as in its
            `state_dict`, or under the first one.

    Returns:
        `SparseWeight` by the dense Parameter's name, in module order. Empty for a model that has none.
    """
    return {
        f"{prefix}.{name}" if prefix else name: weight
        for prefix, module in model.named_modules(remove_duplicate=not every_name)
        for name, weight in cast(dict[str, SparseWeight], module.__dict__.get("sparse24", {})).items()
        if isinstance(weight.storage, storage)
    }


def first_of_each(weights: Mapping[str, SparseWeight]) -> dict[str, SparseWeight]:
    """Without those that share an earlier one's Parameter: a gradient is decayed once, a number counted once."""
    first: dict[int, str] = {}
    for name, weight in weights.items():
        first.setdefault(id(weight.master), name)
    return {name: weights[name] for name in first.values()}
