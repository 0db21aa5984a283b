"""What every GEMM backend provides, and the backend that runs everywhere: dense math on the pruned values."""

from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..formats import Compression, Packed
from .problem import Algorithm, GemmProblem

Operand = TypeVar("Operand", Tensor, Packed, contravariant=True)


class GemmBackend(Protocol[Operand]):
    """Runs GEMMs with one 2:4 operand, whichever matrix that is: a weight, its transpose, or a pruned gradient."""

    def unsupported(self, problem: GemmProblem, device: torch.device) -> str | None:
        """Why this backend cannot run `problem` on `device`, or None where it can."""
        ...

    def encoded_shapes(self, problem: GemmProblem, compression: Compression | None) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors that are the sparse operand, as `run` takes it. Pure: fakes need no history."""
        ...

    def run(
        self,
        sparse: Operand,
        dense: Tensor,
        *,
        bias: Tensor | None,
        transposed: bool,
        scales: tuple[Tensor, Tensor] | None,
        algorithm: Algorithm | None,
    ) -> Tensor:
        """`sparse @ dense`, or with `transposed` the same GEMM as `F.linear` has it.

        Args:
            sparse: the 2:4 operand `[m, k]` as this backend stores it (`encoded_shapes`).
            dense: `[k, n]`, any strides; with `transposed`, `[..., k]`.
            bias: `[m]` in the operands' dtype, or None.
            transposed: `dense` and the result are rows of `[..., k]` and `[..., m]`, not `[k, n]` and `[m, n]`.
            scales: of FP8 operands, (sparse, dense), fp32 scalars. No backend has an FP8 GEMM yet: None.
            algorithm: of a plan that chose this backend.

        Returns:
            The result in the operands' dtype, row-major.

        Raises:
            ValueError: `scales` given to a backend without an FP8 GEMM.
        """
        ...


def reject_scales(backend: str, scales: tuple[Tensor, Tensor] | None) -> None:
    """Raise where FP8 scales are given to a backend that has no FP8 GEMM: without them its result would be wrong."""
    if scales is not None:
        raise ValueError(f"backend={backend!r} has no FP8 GEMM: dequantize the operands and pass scales=None")


class DenseBackend:
    """Dense math on the pruned values, on any device and in any dtype. The operand is stored with its zeros."""

    def unsupported(self, problem: GemmProblem, device: torch.device) -> str | None:
        return None

    def encoded_shapes(self, problem: GemmProblem, compression: Compression | None) -> tuple[tuple[int, ...], ...]:
        return ((problem.m, problem.k),)

    def run(
        self,
        sparse: Tensor,
        dense: Tensor,
        *,
        bias: Tensor | None,
        transposed: bool,
        scales: tuple[Tensor, Tensor] | None,
        algorithm: Algorithm | None,
    ) -> Tensor:
        reject_scales("dense", scales)
        if transposed:
            # F.linear, so that a model gives the same bits before and after its layers are unpatched.
            return torch.nn.functional.linear(dense, sparse, bias)
        result = sparse @ dense
        return result if bias is None else result + bias[:, None]


DENSE = DenseBackend()
