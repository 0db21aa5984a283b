"""The forms in which masks and N:M matrices are stored, and the size of each. Imports nothing of this package.

Sizes are pure functions of the arguments, so fake tensors, kernels and the library agree without a history.
"""

import re
from typing import NamedTuple

import torch
from torch import Tensor


class Pattern(NamedTuple):
    """N:M sparsity: at most `n` of every `m` consecutive elements are not zero.

    Attributes:
        n: elements that are kept of each group, 0 < n < m.
        m: size of a group.

    Examples:
        >>> Pattern.parse("2:4")
        Pattern(n=2, m=4)
        >>> str(Pattern(4, 8))
        '4:8'
    """

    n: int
    m: int

    @classmethod
    def parse(cls, pattern: str) -> "Pattern":
        """Read `"2:4"`.

        Args:
            pattern: `"N:M"` with 0 < N < M, each of at most nine digits.

        Returns:
            The pattern.

        Raises:
            ValueError: `pattern` is not `"N:M"` with 0 < N < M.
        """
        match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", pattern) if isinstance(pattern, str) else None
        if match is None or not 0 < int(match[1]) < int(match[2]):
            raise ValueError(f"pattern={pattern!r}: must be 'N:M' with 0 < N < M, such as '2:4'")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"

    @property
    def is_within_24(self) -> bool:
        """Whether whatever has this pattern is 2:4: one of any M, or two of a multiple of four.

        Sparse tensor cores multiply it, and the packed form holds it: of every four elements, wherever the groups of M
        begin, at most two are not zero.
        """
        return self.n == 1 or (self.n == 2 and self.m % 4 == 0)


class Packed(NamedTuple):
    """A 2:4 matrix `[R, K]`, or a stack of them, without its zeros: 9/16 of the bytes in bf16, 5/16 with int8 values.

    The format does not depend on the device, so it is the one to save. `pack_nm` makes it, `quantize_packed` the one
    with int8 values. Read as int16, `indices` is the row-major metadata that NVIDIA's documentation of the sparse
    instructions uses.

    Attributes:
        values: `[..., R, K/2]`, the two kept elements of every four, in order; int8 from -127 to 127 with `scales`.
        indices: uint8 `[..., R, K/8]`, their places in the four, two bits each, first element lowest. A byte holds two
            groups, the first of them in its lower four bits.
        scales: None, or `[..., R, ceil(K/128)]` in the dtype of the matrix, finite and never negative: one for each
            row and 128 consecutive elements, the last of which may be fewer. An element is its value times its scale,
            rounded once to that dtype.
    """

    values: Tensor
    indices: Tensor
    scales: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrix, which `unpack_nm` gives."""
        return self.values.dtype if self.scales is None else self.scales.dtype

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> "Packed":
        """The matrix in another dtype, in which int8 values stay and their scales change.

        Args:
            dtype: a floating one.
            device: to move it to; None where it is.

        Returns:
            The packed matrix; tensors that are so already are the same ones.
        """
        values, indices, scales = (None if part is None else part.to(device=device) for part in self)
        assert values is not None and indices is not None
        return Packed(values.to(dtype), indices) if scales is None else Packed(values, indices, scales.to(dtype))


SCALED = 128
"""Elements of a row that share a scale, where values are int8."""


def scale_columns(k: int) -> int:
    """Scales of a row of `k` elements."""
    return -(-k // SCALED)


def mask_bytes(size: int) -> int:
    """Bytes that hold `size` mask entries as packed bits."""
    return (size + 7) // 8


def empty_mask(weight: Tensor, packed: bool) -> Tensor:
    """An uninitialised mask of `weight`, row-major whatever the strides of `weight`: bool, or packed bits."""
    if packed:
        return weight.new_empty(*weight.shape[:-1], mask_bytes(weight.shape[-1]), dtype=torch.uint8)
    return weight.new_empty(weight.shape, dtype=torch.bool)


def empty_packed(matrix: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Uninitialised values `[R, K/2]` and indices `[R, K/8]` of a packed `[R, K]` matrix."""
    rows, size = matrix.shape
    return [matrix.new_empty(rows, size // 2, dtype=dtype), matrix.new_empty(rows, size // 8, dtype=torch.uint8)]
