"""Weights that exist in packed form alone: the backend that multiplies by them as they are."""

from operator import index

import torch
from torch import Tensor

from ..cpu import limits
from ..dispatch import choose_kernels, implementation
from ..formats import Packed
from ..operators import register
from .backend import GemmBackend, GemmPlan, Operand
from .problem import GemmProblem

FEW_TOKENS = 64
"""Most tokens that a GPU multiplies a packed weight by as it is: up to 64 tokens a layer is bound by memory, and any
other way moves four times the bytes. An estimate, not measured."""


@register("sparse24::packed_linear", lambda x, values, *others: x.new_empty(x.shape[0], len(values)))
def packed_linear(
    x: Tensor, values: Tensor, mask: Tensor, scales: Tensor | None, m: int, bias: Tensor | None
) -> Tensor:
    """`[T, K]` times a packed `[R, K]`, whose int8 values have scales, plus a bias `[R]` -> `[T, R]`."""
    return implementation("packed_linear", x)(x, values, mask, scales, m, bias)


@torch.compiler.assume_constant_result  # Dynamo keeps the answer: it could not trace the cache
def unsupported_device(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why no kernel reads packed weights on `device`, or None where one does."""
    choice = choose_kernels(device, dtype, operator="packed_linear")
    return choice.reason if choice.implementation == "reference" else None


@torch.compiler.assume_constant_result  # as above
def _most_tokens(device: torch.device, dtype: torch.dtype, layer: str) -> tuple[int | None, str]:
    """The most tokens that a packed weight is multiplied by as it is, None for any number; and where that is from."""
    if choose_kernels(device, dtype, operator="packed_linear").implementation != "cpu":
        return FEW_TOKENS, "until then, the time is that of reading the weight"
    return limits.most_tokens(layer)


class PackedBackend(GemmBackend):
    """Reads a packed weight and multiplies by it, for as few tokens as there are while text is generated."""

    name = "packed"

    def plan(self, problem: GemmProblem, device: torch.device, requested: bool) -> GemmPlan | str:
        if not problem.transposed:
            return "packed weights are multiplied in linear layers"
        if device.type == "cuda" and (problem.is_int8 or problem.dtype == torch.float32 or problem.pattern != (2, 4)):
            stored = "int8" if problem.is_int8 else problem.dtype
            return f"no kernel for GPUs reads packed {problem.pattern} of {stored}"
        reason = unsupported_device(device, problem.dtype)
        if reason is not None:
            return reason
        values = torch.int8 if problem.is_int8 else problem.dtype
        layer = limits.layer(problem.dtype, values, problem.pattern, index(problem.m), index(problem.k))
        most, known = _most_tokens(device, problem.dtype, layer)
        if most is not None and problem.n > most:
            return f"more than {most} tokens ({known})"
        reason = "any number of tokens" if most is None else f"at most {most} tokens"
        return GemmPlan(self, f"{reason} ({known})")

    def encode(self, matrix: Tensor | Packed) -> Operand:
        if not isinstance(matrix, Packed):
            raise ValueError("backend='packed' takes packed weights: pack_nm makes them")
        return Operand(*matrix)

    def linear(self, x: Tensor, weight: Operand, bias: Tensor | None, plan: GemmPlan) -> Tensor:
        values, mask, scales, m = weight
        assert mask is not None
        rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.flatten(0, -2)
        # Operators cost Python some 10 us, as long as a small layer takes. Only tracing needs them: torch.compile,
        # tensors of other kinds, and make_fx, which would record that memory is taken, and not that it is filled.
        plain = type(rows) is Tensor and not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack())
        plain = plain and not rows.is_neg()  # which operators resolve
        run = implementation("packed_linear", rows) if plain else packed_linear
        return run(rows, values, mask, scales, m, bias).view(*x.shape[:-1], len(values))


PACKED = PackedBackend()
