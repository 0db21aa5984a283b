"""Encodings: a pruned weight in the forms that GEMMs take, kept by one rule.

An encoding costs a pass over the weight. Micro-batches, recomputation under gradient checkpointing, and every generated
token need the same one. **It is valid while the versions of the weight and its state are the same, and either the step
is still open in which it was made, or samples of them have not changed.**

- Training: the controller opens a step when an optimizer step has ended, and closes it right before the next. A
  training loop without a controller has no open step, and prunes in every forward pass and every recomputation.
- Training by graphs of torch.compile, which cannot compare versions: tracing reserves what a graph reads, and the
  controller writes that when it opens a step, into the same memory, where CUDA graphs read it too.
- Evaluation: averaged weights and merged adapters are written through `.data`, which no version counter sees, so
  samples of the tensors are compared, which costs 20 % of a one-token GEMM on a CPU. A sample has elements of every row
  and every column: it notices a write to a whole one, and may miss writes to single elements. An evaluation takes them
  when it encodes, so the first one within a step encodes again. A graph prunes in every evaluation.

After a write within a step through `.data`, or to a model that trains by graphs, code calls `clear_encodings` of the
weight. Where FSDP2 or tensor parallelism splits a weight, graphs prune in every forward pass.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from sparse24_kernels.gemm import GemmBackend
from sparse24_kernels.gemm.backend import DENSE, find_backend
from torch import Tensor, nn

from . import sharding

RUNS: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""Runs by `SparseRun.key`: Dynamo hands strings, and no objects, to a function that it calls while it traces."""


class Wanted(NamedTuple):
    """An encoding that a GEMM asks for: its weight operand by name, the form, and the backend that stores it."""

    operand: str
    form: str = "dense"
    backend: GemmBackend = DENSE


class _Kept(NamedTuple):
    """Encodings, with the versions and samples of what they were made from.

    `sources` are views of those tensors, so that no other tensor gets the same address, and `samples` some of their
    values; None before an evaluation has asked. `step` is the open step in which the encodings are known to be valid;
    None where only the samples can say.
    """

    version: tuple[object, ...] = ()
    sources: Sequence[Tensor] = ()
    samples: Sequence[Tensor] | None = None
    step: object | None = None
    tensors: Mapping[Wanted, Tensor] = {}


class Encodings:
    """The encodings of one weight. What graphs read are attributes, by the names that `reserve` gives."""

    def __init__(self, weight: Any):
        self._weight = weight
        # Replaced whole: threads that share a model never see half of it.
        self._kept = _Kept()
        self._reserved: dict[str, tuple[Wanted, torch.dtype]] = {}
        self._written_from: tuple[object, ...] = ()

    def get(self, wanted: Sequence[Wanted], dtype: torch.dtype) -> list[Tensor]:
        """The wanted encodings of the weight as it is, from memory where they are valid."""
        weight, step = self._weight, self._weight.run.open_step
        keep = weight.storage.gathered_from is None  # FSDP2 frees what they would be valid for
        if torch.compiler.is_compiling() and keep and _trains_by_graphs(weight):
            operands = [(one.operand, one.form, one.backend.name) for one in wanted]
            return [getattr(self, name) for name in _reserve(weight.run.key, weight.sizes, operands, dtype)]
        tensors = weight.state.sources()
        keep = keep and _may_be_kept(step, tensors)
        kept = _still_valid(self._kept, dtype, tensors, step if weight.module.training else None) if keep else _Kept()
        if missing := [one for one in wanted if one not in kept.tensors]:
            # What is made in inference mode could not be used in training.
            with torch.inference_mode(False) if keep else nullcontext():
                kept = kept._replace(tensors={**kept.tensors, **self._made(missing, dtype)})
        if keep:
            self._kept = kept
        return [kept.tensors[one] for one in wanted]

    def _made(self, wanted: Iterable[Wanted], dtype: torch.dtype) -> dict[Wanted, Tensor]:
        by_operand: dict[str, list[Wanted]] = {}  # one pass makes all forms of one
        for one in wanted:
            by_operand.setdefault(one.operand, []).append(one)
        return {one: made for ones in by_operand.values() for one, made in zip(ones, self._weight.encode(dtype, ones))}

    def reserve(self, wanted: Sequence[Wanted], dtype: torch.dtype) -> list[str]:
        """Names of the attributes that hold these encodings for graphs from now on."""
        names = [re.sub(r"\W", "_", f"{one.operand} {one.form} {one.backend.name} {dtype}") for one in wanted]
        missing = [name for name in names if name not in self._reserved]
        self._reserved |= {name: (one, dtype) for name, one in zip(names, wanted)}
        self._write(self._reserved if self.is_stale() else missing)
        return names

    @torch.no_grad()
    def _write(self, names: Iterable[str]) -> None:
        self._written_from = _version(self._weight.state.sources())
        for dtype in {self._reserved[name][1] for name in names}:
            wanted = {name: self._reserved[name][0] for name in names if self._reserved[name][1] == dtype}
            made = self._made(wanted.values(), dtype)
            for name, one in wanted.items():
                place = vars(self).get(name)
                if place is None or (place.shape, place.device) != (made[one].shape, made[one].device):
                    place = torch.empty_like(made[one])  # what was made may be state, or a view of it
                    torch._dynamo.mark_static_address(place, guard=False)
                    setattr(self, name, place)
                place.copy_(made[one])

    def is_stale(self) -> bool:
        """Whether a counted write has changed the weight or its state since it was encoded for graphs."""
        return bool(self._reserved) and self._written_from != _version(self._weight.state.sources())

    def clear(self, graphs: bool = False) -> None:
        """Free what is kept. What graphs read is made from the weight as it is where a step is open; with `graphs` it
        is freed too, and graphs are traced again."""
        self._kept = _Kept()
        if graphs:
            for name in self._reserved:
                delattr(self, name)
            self._reserved = {}
        elif self._reserved and self._weight.run.open_step is not None:
            self._write(self._reserved)


@torch.compiler.assume_constant_result  # Dynamo runs it, and then reads the attributes that it made
def _reserve(key: str, sizes: tuple[int, int], operands: Sequence[tuple[str, ...]], dtype: torch.dtype) -> list[str]:
    """Names of operands that all weights of a run with these sizes have then: layers may share the graph of one."""
    names: list[str] = []
    for weight in RUNS[key].controller.weights.values():
        if weight.sizes == sizes and not sharding.is_sharded(weight.master):
            device = weight.parameter.device
            wanted = [Wanted(operand, form, find_backend(name, device)) for operand, form, name in operands]
            names = weight.encodings.reserve(wanted, dtype)
    return names


def _trains_by_graphs(weight: Any) -> bool:
    run, is_exporting = weight.run, torch.compiler.is_exporting()
    within_step = run.open_step is not None and run.controller is not None and weight.module.training
    return within_step and torch.is_grad_enabled() and not is_exporting and not weight.storage.is_split


def _may_be_kept(step: object | None, tensors: Sequence[Tensor]) -> bool:
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and step is None):
        return False
    # Tensors of inference mode have no version; those of subclasses, such as fake ones, may have no values.
    if any(tensor.is_inference() or type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return False
    # A CUDA graph runs again without looking.
    return not (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing())


def _still_valid(kept: _Kept, dtype: torch.dtype, tensors: Sequence[Tensor], open_step: object | None) -> _Kept:
    """`kept` where it is valid, otherwise an empty one for what is to be made from `tensors` as they are."""
    # In training, weights change between steps alone. In evaluation, averaged weights may have been swapped in.
    step = open_step if torch.is_grad_enabled() else None
    version = (dtype, *_version(tensors))
    if kept.version == version:
        if step is not None and kept.step is step:
            return kept
        if kept.samples is not None and all(map(torch.equal, map(sample_of, kept.sources), kept.samples)):
            return kept._replace(step=step)
    sources = [tensor.detach() for tensor in tensors]
    return _Kept(version, sources, [sample_of(source).clone() for source in sources] if step is None else None, step)


def _version(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    return tuple((tensor.data_ptr(), tensor._version) for tensor in tensors)


def sample_of(tensor: Tensor) -> Tensor:
    """A view of elements of every row and every column of a matrix; of one that is not contiguous, of all."""
    if not tensor.is_contiguous() or not tensor.numel():
        return tensor
    columns = tensor.shape[-1] if tensor.dim() else 1
    # No longer than a row, a stride reaches every row; coprime to a row's length, it reaches every column.
    strides = range(min(columns, tensor.numel() // columns), 0, -1)
    return tensor.view(-1)[:: next(stride for stride in strides if math.gcd(stride, columns) == 1)]
