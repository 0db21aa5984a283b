"""SparseWeight: one weight under a method: its masks, and the operands of GEMMs that it becomes.

The library speaks of weights, not of layers: a stack of experts is one weight too.

Where FSDP2 shards a weight, the Parameter is a DTensor, and three things differ:

- State (masks, scales) is computed from the whole weight, which every process gathers for it, so it is the same on all
  of them, and shards may begin within a group or a tile.
- FSDP2 gathers the weight for forward and backward and frees it in between. Encodings of it would stay, so none is
  kept: the backward pass makes its own from the weight that FSDP2 gathers again.
- What updates weights (masked decay, optimizers) works on the part that this process holds, and `local_mask`.

With tensor parallelism a process computes with its part of a weight alone. The state comes from the whole weight too,
and is split as the weight is, so a part must hold whole groups.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import sparse24_kernels as kernels
import torch
from sparse24_kernels import Pattern
from torch import Tensor, nn

from . import sharding
from .encodings import Encodings, Wanted
from .gemms import GRAD_INPUT, PRUNED
from .place import WeightPlace, named_weights
from .rules import Forms, Rule, encode, groups_above, is_exact, mask_of
from .state import WeightState
from .view import WeightRun, WeightView

W = TypeVar("W", bound=WeightPlace)

_OF_STORED = {"compressed": "compressed-transposed", "compressed-transposed": "compressed", "dense": "dense"}
"""Forms of a weight `[out, in]` by the forms of its transpose, as which it may be stored."""


class SparseWeight(WeightState):
    """One sparse weight. `attach` makes one; `sparse_weights(model)` finds them.

    Attributes:
        rng_key: int64 0-d tensor that fixes the draw of MVUE in this weight's layer; None draws anew every time.
    """

    def __init__(self, module: nn.Module, name: str, input_dim: int, run: WeightRun, pattern: Pattern | None = None):
        super().__init__(module, name, input_dim, run, pattern)
        self.rng_key: Tensor | None = None
        self.encodings = Encodings()
        self._checked: frozenset[str] = frozenset()  # the operands that were found to be N:M with this state

    def set_state(self, state: Mapping[str, Tensor]) -> None:
        super().set_state(state)
        self._checked = frozenset()

    @torch.no_grad()
    def mask(self, packed: bool = False) -> Tensor:
        """Which entries the method keeps now: bool in the weight's shape, or packed bits along the last dimension.

        Where the weight is sharded, every process gathers it, and all must call this.
        """
        return self._of_each(lambda view: self._mask_of(view, packed))

    @torch.no_grad()
    def local_mask(self, packed: bool = False) -> Tensor:
        """The mask of what this process updates of the weight. All processes must call this."""
        if not sharding.is_sharded(self.master):
            return self.mask(packed)
        local = sharding.local(self.master)
        if not self.method.mask_is_local or self.cuts_groups(self.method.pattern.m):
            mask = sharding.local(sharding.split_like(self.mask(), self.master)).to(local.device)
            return kernels.pack_bits(mask) if packed else mask
        if not local.numel():  # there may be more processes than rows
            return torch.zeros(0, dtype=torch.uint8 if packed else torch.bool)
        state = {name: x if self.is_split else self.split(x) for name, x in self.state.items()}
        views = self.matrices(local, {name: sharding.local(x).to(local.device) for name, x in state.items()})
        return self.stacked([self._mask_of(view, packed) for view in views])

    @torch.no_grad()
    def fresh_mask(self, parameter: Tensor) -> Tensor:
        """The mask, as packed bits, that another weight like this one has when its state is new."""

        def fresh(view: WeightView) -> Tensor:
            state = self.method.init_state(view, *self.run.progress)
            return self._mask_of(view._replace(state=state), True)

        return self._of_each(fresh, parameter)

    # What GEMMs multiply by.

    @torch.no_grad()
    def pruned(self, dtype: torch.dtype | None = None) -> Tensor:
        """The N:M weight that stands for the master weight: its shape and layout, never -0.0.

        At most N of every M along the input dimension are non-zero. `dtype` is that of the result, by default the
        master's; what is kept never depends on it.
        """
        return self._pruned_to(PRUNED, dtype or self.parameter.dtype)

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The one weight that computes what the layer computes, for export and `unpatch_model`: the pruned weight with
        what the method adds to the output; in the dense phase the master."""
        if self.run.is_dense:
            return sharding.whole(self.parameter)
        parameters = {name: sharding.whole(tensor) for name, tensor in self.parameters.items()}
        return self.out_in(self.method.merge(self.out_in(self.pruned()), parameters, self.run.phase))

    def kept_pruned(self, tokens: int) -> Tensor:
        """The pruned weight, kept as `encodings.py` says, for code that multiplies so many tokens by it itself."""
        dtype, wanted = self.parameter.dtype, Wanted(PRUNED, "dense", None)
        (dense,) = self._kept([wanted], dtype, tokens, lambda operand, forms: [self._pruned_to(operand, dtype)])
        return dense

    def encoded(self, wanted: Sequence[Wanted], dtype: torch.dtype, tokens: int) -> list[Tensor]:
        """Weight operands `[out, in]` in forms that GEMMs of so many tokens take, kept as `encodings.py` says."""
        return self._kept(wanted, dtype, tokens, lambda operand, forms: self._encode(operand, forms, dtype))

    def clear_encodings(self) -> None:
        """Drop what is kept, and free its memory: the next GEMM encodes anew."""
        self.encodings.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> "SparseWeight":
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        copied.rng_key = None  # its controller's
        return copied

    def _mask_of(self, view: WeightView, packed: bool) -> Tensor:
        method = self.method
        if not method.has_own_mask:
            return mask_of(method.prune(view), view, method.pattern, packed)
        mask = method.mask(view)
        return kernels.pack_bits(mask) if packed else mask

    def _of_each(self, function: Callable[[WeightView], Tensor], parameter: Tensor | None = None) -> Tensor:
        """What a function gives for the weight, or for each matrix of a stack, in the shape of the Parameter."""
        return self.stacked([function(view) for view in self.views(parameter)])

    def _pruned_to(self, operand: str, dtype: torch.dtype) -> Tensor:
        """A weight operand in the shape and layout of the Parameter."""
        return self.stacked([made[0] for made in self._made(operand, {"dense": None}, dtype)])

    @torch.no_grad()
    def _encode(self, operand: str, forms: Forms, dtype: torch.dtype) -> list[Tensor]:
        """A weight operand `[out, in]` in the forms that GEMMs take, however the Parameter is stored."""
        if self.input_dim == -1:
            return self._made(operand, forms, dtype)[0]
        (made,) = self._made(operand, {_OF_STORED[form]: how for form, how in forms.items()}, dtype)
        return [tensor.t() if form == "dense" else tensor for form, tensor in zip(forms, made)]

    def _made(self, operand: str, forms: Forms, dtype: torch.dtype) -> list[list[Tensor]]:
        """Of each matrix of the weight, the forms of an operand. The first time, that it is N:M is checked."""
        if not self.state_is_ready:
            raise RuntimeError(
                "this layer was patched on the meta device and has no state yet; load a checkpoint into the model, or "
                "call init_state() on each of hf_sparse24.sparse_weights(model).values() once they have weights"
            )
        sharding.check_supported(self.name, self.master)
        method = self.method
        checks = operand not in self._checked
        checks = checks and not (torch.compiler.is_compiling() or self.parameter.is_meta)
        made = []
        for view in self.views():
            rule = method.prune_grad_input(view) if operand == GRAD_INPUT else method.prune(view)
            if checks and not is_exact(rule):
                self._check_rule(rule, view, operand)
            made.append(encode(rule, view, method.pattern, forms, dtype))
        if checks:
            self._checked |= {operand}
        return made

    def _check_rule(self, rule: Rule, view: WeightView, operand: str) -> None:
        """Raise ValueError where an operand is not N:M: sparse GEMMs, packed weights and exports rely on it."""
        method, pattern = self.method, self.method.pattern
        dims = [view.dim] if operand == PRUNED else []
        if method.transposable and operand == method.gemms.grad_input.weight:
            dims.append(1 - view.dim)
        mask = mask_of(rule, view, pattern, packed=False)
        for dim in dims:
            bad = groups_above(mask, pattern, dim)
            if bad:
                along = "input" if dim == view.dim else "output"
                raise ValueError(
                    f"method {method.name!r} keeps more than {pattern.n} of {pattern.m} weights along the {along} "
                    f"dimension in {bad} groups of {self.name}, so it is not {pattern}; keep fewer"
                )

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
        return self.encodings.get(wanted, dtype, made_from, tokens, self.run.open_step, make, keep)


def sparse_weights(model: nn.Module) -> dict[str, SparseWeight]:
    """The sparse weights of a model.

    Args:
        model: any model, patched or not.

    Returns:
        `SparseWeight` by the Parameter's name, in module order; modules that are shared count once. Empty for a model
        that is not patched.
    """
    return cast(dict[str, SparseWeight], named_weights(model, "sparse24"))


def first_of_each(weights: Mapping[str, W]) -> dict[str, W]:
    """Without those that share an earlier one's Parameter: a gradient is decayed once, a number counted once."""
    first: dict[int, str] = {}
    for name, weight in weights.items():
        first.setdefault(id(weight.master), name)
    return {name: weights[name] for name in first.values()}
