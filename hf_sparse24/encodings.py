"""Encodings: a pruned weight in the forms that GEMMs take, kept by one rule.

Making an encoding costs a pass over the weight, and micro-batches and recomputation under gradient checkpointing need
the same one. So **an encoding is valid while the step stays open in which it was made, for the versions of the weight
and its state that it was made from.**

The controller opens a step when an optimizer step has ended, and closes it right before the next. A training loop
without a controller has no open step, and prunes in every forward pass and every recomputation. So does everything
without gradients: averaged weights and merged adapters are written through `.data`, which no version counter sees.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from sparse24_kernels import Compression
from torch import Tensor

Forms = Mapping[str, Compression | None]
"""Forms of a matrix by the names that `sparse24_kernels.prune_forms` knows; for compressed ones, how to compress."""


class Wanted(NamedTuple):
    """An encoding that a GEMM asks for: `Gemm.weight`, `Gemm.weight_form` and `GemmPlan.compression`."""

    operand: str
    form: str
    compression: Compression | None


class RunState:
    """What changes while a model trains, one object for all its sparse weights; `phase` is saved beside the settings.

    Attributes:
        phase: `"sparse"`, `"dense"`, or another phase of the method: what the weights are used as.
        step: an object that stands for the open step, None where none is open.
    """

    def __init__(self, phase: str = "sparse"):
        self.phase = phase
        self.step: object | None = None

    @contextmanager
    def open_step(self) -> Iterator[None]:
        """Keep encodings within the block, in which nobody changes the weights."""
        self.begin_step()
        try:
            yield
        finally:
            self.end_step()

    def begin_step(self) -> None:
        self.step = object()

    def end_step(self) -> None:
        self.step = None

    def __getstate__(self) -> dict[str, Any]:
        return {"phase": self.phase, "step": None}  # a copy has no controller


class Encodings:
    """Those of one weight. A copy starts empty: they are derived."""

    def __init__(self) -> None:
        # Key and tensors are one tuple, replaced whole: threads that share a model never see half of it.
        self._kept: tuple[tuple[Any, ...], dict[tuple[str, str], Tensor]] = ((), {})

    def get(
        self, wanted: Sequence[Wanted], key: tuple[Any, ...] | None, make: Callable[[str, Forms], Sequence[Tensor]]
    ) -> list[Tensor]:
        """The wanted encodings, from memory where they are valid.

        Args:
            key: of `validity`; None keeps nothing.
            make: makes all forms of one operand in one pass.
        """
        kept_key, tensors = self._kept
        if key is None or key != kept_key:
            tensors = {}
        missing: dict[str, dict[str, Compression | None]] = {}
        for operand, form, compression in wanted:
            if (operand, form) not in tensors:
                missing.setdefault(operand, {})[form] = compression
        for operand, forms in missing.items():
            made = zip(forms, make(operand, forms))
            tensors = tensors | {(operand, form): tensor for form, tensor in made}
        if key is not None and missing:
            self._kept = key, tensors
        return [tensors[operand, form] for operand, form, _ in wanted]

    def clear(self) -> None:
        """Drop what is kept, and free its memory."""
        self._kept = ((), {})

    def __reduce__(self):
        return Encodings, ()


@dataclass(frozen=True)
class _Source:
    """A tensor as it is now. Holding its storage keeps every other tensor from coming to lie at the same address."""

    address: int
    version: int
    storage: torch.UntypedStorage = field(compare=False)


def validity(run_state: RunState, dtype: torch.dtype, tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    """What encodings made from `tensors` are kept by; None where they must not be kept."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or run_state.step is None:
        return None
    if any(tensor.is_inference() for tensor in tensors):  # they have no version
        return None
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return None  # a graph runs again without looking
    sources = (_Source(tensor.data_ptr(), tensor._version, tensor.untyped_storage()) for tensor in tensors)
    return (run_state.step, dtype, *sources)
