"""How long the GEMMs of a training step take, dense and sparse, and what pruning costs, for `hf-sparse24 plan`.

Times come from the tuning table of this device, and from the measurements of others where it has no entry. What moves
memory only is counted in bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import sparse24_kernels as kernels
import torch
from sparse24_kernels import GemmProblem
from sparse24_kernels.gemm import autotune, cusparselt

from ..methods.masked_decay import MaskedDecayMethod
from ..weights.gemms import PRUNED, Gemm
from ..weights.sparse_weight import SparseWeight
from .costs import MASTER_BYTES
from .sizes import Setting


@dataclass(frozen=True)
class PublishedSweep:
    """Speed-ups of 2:4 GEMMs as others have measured them.

    Attributes:
        name: how every figure that is derived from it is marked.
        source: whose measurements, of what.
        dense_flops: operations per second of dense GEMMs, the median over shapes of language models from 2048 tokens.
        speedups: (tokens from which it holds, geometric mean over those shapes of dense time / sparse time).
    """

    name: str
    source: str
    dense_flops: float
    speedups: tuple[tuple[int, float], ...]

    def dense_us(self, operations: float) -> float:
        return operations / self.dense_flops * 1e6

    def speedup(self, tokens: float) -> float:
        """That of a GEMM with so many rows of activations."""
        return next(speedup for start, speedup in reversed(self.speedups) if tokens >= start)


PUBLISHED = PublishedSweep(
    name="published sweep, H100 PCIe",
    source="github.com/bcacdwk/vllmbench at 92a8ca4 (code of arXiv 2603.05232): cuSPARSELt 0.8.1 over cuBLASLt, bf16, "
    "the best of all algorithms on both sides, their results not checked there",
    dense_flops=455e12,
    speedups=((0, 0.87), (256, 1.11), (1024, 1.39), (2048, 1.50), (8192, 1.57)),
)

MEASURED = "measured here"

BANDWIDTH = 0.8 * 2.0e12
"""Bytes per second that pruning, MVUE and masked decay move: 80 % (what our kernels aim at, not measured) of the
2.0 TB/s in Nvidia's data sheet of the H100 PCIe."""

REST = (0.1, 0.4)
"""Share of a dense step that is neither a GEMM nor attention: norms, activations, the optimizer, communication that is
not hidden. An assumption."""

_MASK = 1 / 8  # bytes of an element of a packed mask


class Matrix(NamedTuple):
    """What linear layers of one kind multiply by, as one process has it.

    Attributes:
        out, inputs: sizes.
        matrices: how many there are: layers, times experts in a stack.
        token_share: of a step's tokens, which an expert sees a part of.
        runs_again: whether gradient checkpointing repeats its output GEMM.
        weight: one of those that are sparse; None for dense layers.
    """

    out: int
    inputs: int
    matrices: int
    token_share: float
    runs_again: bool
    weight: SparseWeight | None


class LayerTime(NamedTuple):
    """What the layers of one kind cost in a step, all of them together.

    Attributes:
        matrix: the kind.
        dense_us, sparse_us: of the GEMMs of dense layers, and of those of patched ones.
        pruning_us: of pruning weights and gradients, of masked decay and mask refreshes.
        sparse: names of the GEMMs that sparse tensor cores run.
        encodings: bytes of the encodings of one layer of the kind.
        sources: of the times.
    """

    matrix: Matrix
    dense_us: float
    sparse_us: float
    pruning_us: float
    sparse: tuple[str, ...]
    encodings: float
    sources: set[str]


def layer_time(matrix: Matrix, setting: Setting, refreshes: float) -> LayerTime:
    """Predict what the layers of one kind cost; `refreshes` is how often per step a mask or scale is computed anew."""
    rows, dtype = max(1, round(setting.tokens * matrix.token_share)), setting.dtype
    dense_us = sparse_us = 0.0
    sparse: list[str] = []
    sources: set[str] = set()
    gemms = matrix.weight.method.gemms if matrix.weight is not None else _DENSE
    for gemm in gemms:
        times = _gemm_us(gemm, matrix, rows, setting)
        repeats = matrix.matrices * (2 if gemm.name == "output" and matrix.runs_again else 1)
        dense_us, sparse_us = dense_us + repeats * times.dense, sparse_us + repeats * times.planned
        sparse += [gemm.name] if times.is_sparse else []
        sources.add(times.source)
    if matrix.weight is None:
        return LayerTime(matrix, dense_us, dense_us, 0.0, (), 0.0, sources)
    forms = _forms(matrix.weight, sparse, dtype)
    if setting.parallel == "fsdp2":  # frees weights between the passes, and no encoding of them is kept
        passes = [forms[:1], forms[-1:], *([forms[:1]] if matrix.runs_again else [])]
        read_bytes, local_share, held = dtype.itemsize, 1 / setting.gpus, max(forms)
    else:
        passes, read_bytes, local_share, held = [forms], MASTER_BYTES, 1.0, sum(forms)
    elements = matrix.out * matrix.inputs
    moved = elements * (
        sum(read_bytes + _kept_mask(matrix.weight) + sum(written) for written in passes)
        + _decay_bytes(matrix.weight) * local_share
        + (MASTER_BYTES + _kept_mask(matrix.weight)) * refreshes
    )
    moved += rows * matrix.out * _gradient_bytes(matrix.weight, sparse, dtype)
    pruning_us = matrix.matrices * moved / BANDWIDTH * 1e6
    return LayerTime(matrix, dense_us, sparse_us, pruning_us, tuple(sparse), held * elements, sources)


_DENSE = (Gemm("output", None), Gemm("grad_input", None), Gemm("grad_weight", None, None))


class _Times(NamedTuple):
    dense: float
    planned: float
    is_sparse: bool
    source: str


def _gemm_us(gemm: Gemm, matrix: Matrix, rows: int, setting: Setting) -> _Times:
    """A GEMM as dense math, and as `backend="auto"` would run it once tuned: sparse where that is faster."""
    dtype, device = setting.dtype, setting.device
    problem = gemm.problem(rows, matrix.out, matrix.inputs, dtype)
    weight = matrix.weight
    can_be_sparse = (
        problem is not None
        and weight is not None
        and not weight.is_stack
        and weight.run.backend != "dense"
        and cusparselt.unsupported_matrix(problem.m, problem.k, problem.dtype) is None
    )
    usual = kernels.linear_problem(rows, matrix.out, matrix.inputs, dtype)
    verdict = autotune.choose(problem if problem is not None and can_be_sparse else usual, device)
    if verdict.dense_us is not None:  # a GEMM that is always dense has as many operations as the output GEMM
        sparse_us = verdict.sparse_us if can_be_sparse and verdict.backend != "dense" else None
        return _Times(verdict.dense_us, sparse_us or verdict.dense_us, sparse_us is not None, MEASURED)
    dense = PUBLISHED.dense_us(2.0 * rows * matrix.out * matrix.inputs)
    speedup = PUBLISHED.speedup(_published_tokens(problem, rows)) if problem is not None and can_be_sparse else 1.0
    is_sparse = speedup >= autotune.MARGIN
    return _Times(dense, dense / speedup if is_sparse else dense, is_sparse, PUBLISHED.name)


def _published_tokens(problem: GemmProblem, rows: int) -> int:
    """Where the sweep, which measures the output GEMM, is read: at the columns of the dense operand, but for
    grad_weight, which contracts over tokens, at no more than these."""
    return min(problem.n, rows)


def _forms(weight: SparseWeight, sparse: list[str], dtype: torch.dtype) -> list[float]:
    """Bytes per element of the encodings that a step needs: the one of the output GEMM first, that of grad_input last.

    One that both GEMMs take counts once. Dense, or 9/16 of that for each direction (see `Gemm.weight_form`).
    """
    gemms = weight.method.gemms
    found = {}
    for gemm, form in ((gemms.output, "compressed"), (gemms.grad_input, "compressed-transposed")):
        is_sparse = gemm.name in sparse
        key = (gemm.weight or PRUNED, form if is_sparse else "dense")
        found[key] = dtype.itemsize * (9 / 16 if is_sparse else 1)
    return list(found.values())


def _kept_mask(weight: SparseWeight) -> float:
    """Bytes per element of a mask that the method keeps, which pruning reads and a refresh writes."""
    return _MASK if any(tensor.dtype == torch.uint8 for tensor in weight.state.values()) else 0.0


def _decay_bytes(weight: SparseWeight) -> float:
    """Bytes that masked decay moves per element: it reads gradient, weight and mask, and writes the gradient. A mask
    that is not kept is made from the weight first."""
    method = weight.method
    if not (isinstance(method, MaskedDecayMethod) and method.settings.masked_decay):
        return 0.0
    return 3 * MASTER_BYTES + _MASK + (0.0 if _kept_mask(weight) else MASTER_BYTES + _MASK)


def _gradient_bytes(weight: SparseWeight, sparse: list[str], dtype: torch.dtype) -> float:
    """Bytes that pruning the output's gradient moves per element: for each GEMM that asks for it, the gradient is read,
    and written in one form."""
    gemms = weight.method.gemms
    pruned = [gemm for gemm in (gemms.grad_input, gemms.grad_weight) if gemm.estimator != "none"]
    return sum(dtype.itemsize * (1 + (9 / 16 if gemm.name in sparse else 1)) for gemm in pruned)


class StepTime(NamedTuple):
    """Microseconds of a step, communication and everything else than GEMMs left out.

    `dense`, `sparse`: GEMMs of the layers that are patched, when dense and when sparse. `pruning`: see `LayerTime`.
    `others`: GEMMs of other linear layers. `attention`: its two GEMMs.
    """

    dense: float
    sparse: float
    pruning: float
    others: float
    attention: float

    def speedup(self, rest: float) -> float:
        """Dense step over sparse step, where `rest` is the share of the dense one that is neither."""
        same = self.others + self.attention
        everything_else = (self.dense + same) * rest / (1 - rest)
        return (self.dense + same + everything_else) / (self.sparse + self.pruning + same + everything_else)


def attention_us(tokens: int, sequence: int, width: int, layers: int, runs_again: bool) -> float:
    """Scores and values of causal attention at the dense rate of `PUBLISHED`: half of 4 x tokens x sequence x width
    operations forward, 2.5 times that backward (FlashAttention recomputes the scores, arXiv 2307.08691).

    Args:
        width: heads x head size, as one process has them.
    """
    forward = 2.0 * tokens * sequence * width
    return layers * PUBLISHED.dense_us(forward * (4.5 if runs_again else 3.5))


def break_even(saves: Callable[[int], float], largest: int = 2**20) -> int | None:
    """The smallest multiple of 16 tokens at which a sparse step is no slower; None where there is none up to `largest`.

    Args:
        saves: microseconds that a sparse step of so many tokens saves. Taken to stay positive once it is.
    """
    high = 16
    while saves(high) < 0:
        high *= 2
        if high > largest:
            return None
    low = high // 2
    while high - low > 16:
        middle = (low + high) // 32 * 16
        low, high = (low, middle) if saves(middle) >= 0 else (middle, high)
    return high
