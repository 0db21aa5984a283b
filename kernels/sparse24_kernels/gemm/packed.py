"""Weights that exist in packed form alone: a backend that multiplies by them, and operands of the other backends."""

import torch
from torch import Tensor

from .. import reference
from ..dispatch import choose_kernels, implementation
from ..formats import Compression, Packed
from . import cusparselt
from .backend import reject_scales
from .layout import layout_of
from .problem import Algorithm, GemmProblem


@torch.library.custom_op("sparse24::unpack_nm", mutates_args=())
def unpack(values: Tensor, indices: Tensor) -> Tensor:
    return implementation(indices).packed.unpack_nm(values, indices)


@unpack.register_fake
def _(values: Tensor, indices: Tensor) -> Tensor:
    return values.new_empty(values.shape[0], values.shape[1] * 2)


@torch.library.custom_op("sparse24::compress_packed", mutates_args=())
def compress(values: Tensor, indices: Tensor, columns: int, layout: int) -> Tensor:
    """What `cusparselt.compress` makes of the dense matrix; where the layout is known, only the indices move."""
    m, k = len(values), 2 * values.shape[1]
    found = layout_of(Compression(columns, layout), m, k, values.dtype, values.device)
    if found is None:
        return cusparselt.compress(unpack(values, indices), columns)
    return reference.prune.compress(values, indices, found)


@compress.register_fake
def _(values: Tensor, indices: Tensor, columns: int, layout: int) -> Tensor:
    return values.new_empty(len(values), columns)


@torch.library.custom_op("sparse24::packed_linear", mutates_args=())
def linear(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None) -> Tensor:
    return implementation(x).packed.packed_linear(x, values, indices, bias)


@linear.register_fake
def _(x: Tensor, values: Tensor, indices: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(len(x), len(values))


@torch.compiler.assume_constant_result  # Dynamo keeps the answer: it could not trace the cache
def unsupported_device(device: torch.device, dtype: torch.dtype) -> str | None:
    choice = choose_kernels(device, dtype)
    return None if choice.backend == "triton" else choice.reason


class PackedBackend:
    """Reads a packed weight and multiplies by it, for as few tokens as there are while text is generated."""

    def unsupported(self, problem: GemmProblem, device: torch.device) -> str | None:
        if problem.k % 8:
            return f"packed matrices have multiples of 8 columns, not {problem.k}"
        return unsupported_device(device, problem.dtype)

    def encoded_shapes(self, problem: GemmProblem, compression: Compression | None) -> tuple[tuple[int, ...], ...]:
        return (problem.m, problem.k // 2), (problem.m, problem.k // 8)

    def run(
        self,
        sparse: Packed,
        dense: Tensor,
        *,
        bias: Tensor | None,
        transposed: bool,
        scales: tuple[Tensor, Tensor] | None,
        algorithm: Algorithm | None,
    ) -> Tensor:
        reject_scales("packed", scales)
        if not transposed:
            return linear(dense.t(), *sparse, bias).t().contiguous()
        rows = dense.reshape(-1, dense.shape[-1]) if dense.numel() else dense.flatten(0, -2)
        return linear(rows, *sparse, bias).view(*dense.shape[:-1], len(sparse.values))


PACKED = PackedBackend()
