"""Encodings: a pruned weight in the forms that GEMMs take, kept by one rule.

An encoding costs a pass over the weight. Micro-batches, recomputation under gradient checkpointing, and every generated
token need the same one. **It is valid while the versions of the weight and its state are the same, and either the step
is still open in which it was made, or samples of them have not changed.**

- Training: the controller opens a step when an optimizer step has ended, and closes it right before the next. A
  training loop without a controller has no open step, and prunes in every forward pass and every recomputation.
- Evaluation: averaged weights and merged adapters are written through `.data`, which no version counter sees, so
  samples of the tensors are compared. A sample has elements of every row and every column: it notices a write to a
  whole one, and may miss writes to single elements.

Comparing a sample costs 20 % of a one-token GEMM on a CPU. Below 8 tokens we compare an eighth of it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import NamedTuple

import torch
from sparse24_kernels.gemm import GemmBackend
from sparse24_kernels.gemm.backend import DENSE
from torch import Tensor, nn


class Wanted(NamedTuple):
    """An encoding that a GEMM asks for: `Gemm.weight`, `Gemm.weight_form`, and the backend that stores it."""

    operand: str
    form: str = "dense"
    backend: GemmBackend = DENSE


class _Kept(NamedTuple):
    """Encodings, with the versions and samples of what they were made from.

    Samples share the memory of those tensors, so no other tensor gets the same address. `step` is the open step in
    which the encodings are known to be valid; None where only the samples can say.
    """

    version: tuple[object, ...] = ()
    samples: Sequence["Sample"] = ()
    step: object | None = None
    tensors: Mapping[Wanted, Tensor] = {}


class Encodings:
    """The encodings of one weight. A copy starts empty: they are derived."""

    def __init__(self) -> None:
        # Replaced whole: threads that share a model never see half of it.
        self._kept = _Kept()

    def get(
        self,
        wanted: Sequence[Wanted],
        dtype: torch.dtype,
        tensors: Sequence[Tensor],
        tokens: int,
        step: object | None,
        make: Callable[[Sequence[Wanted]], Sequence[Tensor]],
        keep: bool = True,
    ) -> list[Tensor]:
        """The wanted encodings of `tensors`, from memory where they are valid, unless `keep` is False.

        `make` makes all forms of one operand in one pass. With more `tokens`, comparing whole samples costs less.
        """
        keep = keep and _may_be_kept(step, tensors)
        kept = _still_valid(self._kept, dtype, tensors, tokens, step) if keep else _Kept()
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

    def __reduce__(self):
        return Encodings, ()


def _may_be_kept(step: object | None, tensors: Sequence[Tensor]) -> bool:
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and step is None):
        return False
    # Tensors of inference mode have no version; those of subclasses, such as fake ones, may have no values.
    if any(tensor.is_inference() or type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return False
    # A CUDA graph runs again without looking.
    return not (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing())


def _still_valid(
    kept: _Kept, dtype: torch.dtype, tensors: Sequence[Tensor], tokens: int, open_step: object | None
) -> _Kept:
    """`kept` where it is valid, otherwise an empty one for what is to be made from `tensors` as they are."""
    # With gradients, weights change between steps alone. Without, averaged weights may have been swapped in.
    step = open_step if torch.is_grad_enabled() else None
    version = (dtype, *((tensor.data_ptr(), tensor._version) for tensor in tensors))
    if kept.version == version:
        if step is not None and kept.step is step:
            return kept
        if not any(sample.has_changed(tokens) for sample in kept.samples):
            return kept if kept.step is step else kept._replace(step=step)
    return _Kept(version, [Sample(tensor) for tensor in tensors], step)


class Sample:
    """Some elements of a matrix, at least one of every row and of every column: a flat view, and a copy of it."""

    MANY_TOKENS = 8

    def __init__(self, tensor: Tensor):
        # A copy of what is not contiguous would not change with it.
        view = tensor.detach().view(-1)[:: _stride(tensor.shape)] if tensor.is_contiguous() else tensor.detach()
        self.view, self.values = view, view.clone()
        self._few = view[:: self.MANY_TOKENS], self.values[:: self.MANY_TOKENS]

    def has_changed(self, tokens: int) -> bool:
        view, values = self._few if tokens < self.MANY_TOKENS else (self.view, self.values)
        return not torch.equal(view, values)


@cache
def _stride(shape: torch.Size) -> int:
    """No longer than a row, it reaches every row; coprime to a row's length, it reaches every column."""
    columns = shape[-1] if shape else 1
    stride = max(1, min(columns, shape.numel() // max(columns, 1)))
    while math.gcd(stride, columns) > 1:
        stride -= 1
    return stride
