"""The three GEMMs of a linear layer as data: which operand is sparse, how it becomes so, and in what precision.

A method describes its GEMMs once (`SparseMethod.gemms`). The layer runs them, `doctor` and the autotuner read them: one
place decides what can run on sparse tensor cores: `Gemm.plan`.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import sparse24_kernels as kernels
import torch
from sparse24_kernels import Pattern
from sparse24_kernels.formats import turned
from sparse24_kernels.gemm import GemmPlan, GemmProblem, linear_problem, mm_problem, plan_gemm
from sparse24_kernels.gemm.backend import DENSE, ON_CHANGE, encode_one
from sparse24_kernels.mvue import mvue_unchecked
from torch import Tensor

from .encodings import Wanted

HARDWARE_PATTERN = Pattern(2, 4)
"""What sparse tensor cores multiply, and with it every pattern that is within it (`Pattern.is_within_24`)."""

PRUNED, GRAD_INPUT = "pruned", "grad_input"
"""Names of weight operands: what `SparseMethod.prune` gives, and what `prune_grad_input` does where a method has it."""

MASK = "mask"
"""The mask's packed bits, kept as operands are."""

_ESTIMATES: dict[str, Pattern | None] = {"none": None, "mvue-1:2": Pattern(1, 2)}
_ESTIMATES |= dict.fromkeys(("magnitude", "mvue", "mvue-approx"), HARDWARE_PATTERN)


@dataclass(frozen=True)
class Gemm:
    """One of a layer's three GEMMs (see `layers/linear.py`), with X `[T, in]`, W `[out, in]` and dZ `[T, out]`.

    Attributes:
        name: which of the three.
        sparse: the operand that has the pattern along the contracted dimension, so that sparse tensor cores can take
            it; None for dense math, whatever zeros the operands hold.
        weight: the weight operand by name, `"pruned"` or `"grad_input"`. GEMMs with the same name share one pruned
            weight. None for grad_weight, which has no weight operand.
        estimator: how the operand that is no weight (X in output, dZ in the other two) is pruned, in groups along the
            contracted dimension: `"none"`, `"magnitude"` (2:4), `"mvue"`, `"mvue-approx"` (2:4) or `"mvue-1:2"`.
        pattern: of the sparse operand.
        precision: `"native"`, or `"fp8-simulated"`: operands are rounded to FP8, the GEMM runs in their own dtype.
    """

    name: Literal["output", "grad_input", "grad_weight"]
    sparse: Literal["weight", "input", "grad"] | None
    weight: str | None = PRUNED
    estimator: str = "none"
    pattern: Pattern = HARDWARE_PATTERN
    precision: Literal["native", "fp8-simulated"] = "native"

    def unsupported(self) -> str | None:
        """Why this GEMM is dense math at every size and on every device; None where sizes and device decide."""
        if self.sparse is None:
            return "the method has no sparse operand in it"
        if self.precision != "native":
            return "FP8 is simulated in dense math"
        if not self.pattern.is_within_24:
            return f"sparse tensor cores multiply {HARDWARE_PATTERN}, which {self.pattern} is not within"
        if self.sparse != ("grad" if self.name == "grad_weight" else "weight"):
            return f"no kernel takes a sparse {self.sparse} in the {self.name} GEMM"
        if self.sparse == "grad" and not self.estimator.startswith("mvue"):
            return f"no kernel compresses a gradient by estimator={self.estimator!r}"
        return None

    def problem(self, tokens: int, out: int, inputs: int, dtype: torch.dtype) -> GemmProblem | None:
        """The sparse GEMM that this is for these sizes; None where it is always dense math (`unsupported`)."""
        if self.unsupported() is not None:
            return None
        if self.name == "grad_weight":
            return mm_problem(out, inputs, tokens, dtype)
        rows, columns = (out, inputs) if self.name == "output" else (inputs, out)
        return linear_problem(tokens, rows, columns, dtype)

    def plan(
        self, tokens: int, out: int, inputs: int, dtype: torch.dtype, device: torch.device, backend: str
    ) -> GemmPlan:
        """What runs this GEMM, and why (see `sparse24_kernels.gemm.plan_gemm`). Plans are kept: every pass asks."""
        make = _kept_plan if type(tokens) is int and not torch.compiler.is_compiling() else _make_plan
        return make(self, tokens, out, inputs, dtype, device, backend)

    def wanted(self, plan: GemmPlan) -> Wanted:
        """The encoding of the weight that the plan takes. The grad_input GEMM's operand is the transpose."""
        form = turned(plan.form) if plan.is_sparse and self.name != "output" else plan.form
        return Wanted(self.weight or PRUNED, form, plan.backend)

    def prune(self, operand: Tensor, dim: int, key: Tensor | None) -> Tensor:
        """The operand that is no weight, pruned by the estimator in groups along `dim`: a dense tensor with zeros.
        `key` fixes a random estimator's draw; None for torch's generator."""
        if self.estimator == "none":
            return operand
        if self.estimator != "magnitude":
            return self._drawn(operand, dim, key)
        size = operand.shape[dim]
        if missing := -size % HARDWARE_PATTERN.m:  # tokens need not fill their groups
            zeros = operand.new_zeros(*operand.shape[:dim], missing, *operand.shape[dim:][1:])
            operand = torch.cat([operand, zeros], dim)
        return kernels.nm_prune(operand, *HARDWARE_PATTERN, dim).narrow(dim, 0, size)

    def compress(self, operand: Tensor, key: Tensor | None, plan: GemmPlan) -> Tensor:
        """The operand `[T, out]` pruned along tokens, as the backend of a sparse plan stores it."""
        form = turned(plan.form)
        return encode_one(plan.backend, self._drawn(operand, 0, key, form), form)

    def _drawn(self, operand: Tensor, dim: int, key: Tensor | None, form: str = "dense") -> Tensor:
        how = "approx" if self.estimator == "mvue-approx" else "exact"
        n, m = _ESTIMATES[self.estimator] or HARDWARE_PATTERN
        return mvue_unchecked(operand, n, m, dim % operand.dim(), how, key, form)


def _make_plan(
    gemm: Gemm, tokens: int, out: int, inputs: int, dtype: torch.dtype, device: torch.device, backend: str
) -> GemmPlan:
    problem = gemm.problem(tokens, out, inputs, dtype)
    if problem is None:
        return GemmPlan(DENSE, gemm.unsupported() or "")
    return plan_gemm(problem, device, backend)


_kept_plan = lru_cache(maxsize=4096)(_make_plan)
ON_CHANGE.append(_kept_plan.cache_clear)


class Gemms(NamedTuple):
    """The three GEMMs of a layer, in the order in which training runs them."""

    output: Gemm
    grad_input: Gemm
    grad_weight: Gemm


def standard_gemms(pattern: Pattern, settings: object, transposable: bool, own_grad_input: bool) -> Gemms:
    """The GEMMs of a method that multiplies by a pruned weight, by those fields of `GemmSettings` that `settings` has;
    `transposable` and `own_grad_input` are about the weight of the grad_input GEMM, as in `SparseMethod`."""
    words = {"dense": "none", "2:4": "magnitude"}
    given = [getattr(settings, name, "dense") for name in ("activations", "input_grad", "weight_grad")]
    output, inputs, weights = (words.get(how, how) for how in given)
    precision: Literal["native", "fp8-simulated"] = "fp8-simulated" if getattr(settings, "fp8", False) else "native"
    # Once dZ is pruned along out, it is the sparse operand; no hardware multiplies two of them.
    sparse: Literal["weight", "grad"] | None = "grad" if inputs != "none" else "weight" if transposable else None
    weight = GRAD_INPUT if own_grad_input else PRUNED
    drawn: Literal["grad"] | None = None if weights == "none" else "grad"
    return Gemms(
        Gemm("output", "weight", PRUNED, output, pattern, precision),
        Gemm("grad_input", sparse, weight, inputs, _ESTIMATES[inputs] or pattern, precision),
        Gemm("grad_weight", drawn, None, weights, _ESTIMATES[weights] or pattern, precision),
    )
