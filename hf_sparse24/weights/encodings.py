"""Encodings: a pruned weight in the forms that GEMMs take, kept by one rule.

An encoding costs a pass over the weight. Micro-batches, recomputation under gradient checkpointing, and every generated
token need the same one. **It is valid while the versions of the weight and its state are the same, and either the step
is still open in which it was made, or samples of them have not changed.**

- Training: the controller opens a step when an optimizer step has ended, and closes it right before the next. A
  training loop without a controller has no open step, and prunes in every forward pass and every recomputation.
- Evaluation: averaged weights and merged adapters are written through `.data`, which no version counter sees, so
  samples of the tensors are compared, which costs 20 % of a one-token GEMM on a CPU. A sample has elements of every row
  and every column: it notices a write to a whole one, and may miss writes to single elements. An evaluation takes them
  when it encodes, so the first one within a step encodes again.

Code that writes through `.data` within a step calls `clear_encodings` of the weight.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from sparse24_kernels.gemm import GemmBackend
from sparse24_kernels.gemm.backend import DENSE
from torch import Tensor, nn


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
    """The encodings of one weight."""

    def __init__(self) -> None:
        # Replaced whole: threads that share a model never see half of it.
        self._kept = _Kept()

    def get(
        self,
        wanted: Sequence[Wanted],
        dtype: torch.dtype,
        tensors: Sequence[Tensor],
        step: object | None,
        make: Callable[[Sequence[Wanted]], Sequence[Tensor]],
        keep: bool = True,
    ) -> list[Tensor]:
        """The wanted encodings of `tensors`, from memory where they are valid, unless `keep` is False. `make` makes all
        forms of one operand in one pass."""
        keep = keep and _may_be_kept(step, tensors)
        kept = _still_valid(self._kept, dtype, tensors, step) if keep else _Kept()
        missing: dict[str, list[Wanted]] = {}
        for one in wanted:
            if one not in kept.tensors:
                missing.setdefault(one.operand, []).append(one)
        if missing:
            # What is made in inference mode could not be used in training.
            with torch.inference_mode(False) if keep else nullcontext():
                made = {one: tensor for ones in missing.values() for one, tensor in zip(ones, make(ones))}
            kept = kept._replace(tensors={**kept.tensors, **made})
        if keep:
            self._kept = kept
        return [kept.tensors[one] for one in wanted]


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
    # With gradients, weights change between steps alone. Without, averaged weights may have been swapped in.
    step = open_step if torch.is_grad_enabled() else None
    version = (dtype, *[(tensor.data_ptr(), tensor._version) for tensor in tensors])
    if kept.version == version:
        if step is not None and kept.step is step:
            return kept
        if kept.samples is not None and all(map(torch.equal, map(sample_of, kept.sources), kept.samples)):
            return kept._replace(step=step)
    sources = [tensor.detach() for tensor in tensors]
    return _Kept(version, sources, [sample_of(source).clone() for source in sources] if step is None else None, step)


def sample_of(tensor: Tensor) -> Tensor:
    """Some elements of a matrix, at least one of every row and of every column, as a view; of one that is not
    contiguous, which has no flat view, all."""
    if not tensor.is_contiguous() or not tensor.numel():
        return tensor
    columns = tensor.shape[-1] if tensor.dim() else 1
    # No longer than a row, a stride reaches every row; coprime to a row's length, it reaches every column.
    strides = range(min(columns, tensor.numel() // columns), 0, -1)
    return tensor.view(-1)[:: next(stride for stride in strides if math.gcd(stride, columns) == 1)]
