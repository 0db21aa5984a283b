"""The forms in which masks and N:M matrices are stored, and the size of each. Imports nothing of this package.

Sizes are pure functions of the arguments, so fake tensors, kernels and the library agree without a history.
"""

import re
from collections.abc import Sequence
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
        """True where a matrix of this pattern is 2:4 too: one of any M, or two of a multiple of four.

        Sparse tensor cores multiply it, and the packed form holds it: of every four elements, wherever the groups of M
        begin, at most two are not zero.
        """
        return self.n == 1 or (self.n == 2 and self.m % 4 == 0)


class Packed(NamedTuple):
    """An N:M matrix `[R, K]`, or a stack of them, without its zeros: at 2:4 or 16:32, 9/16 of the bytes in bf16, and
    5/16 with int8 values.

    The format does not depend on the device, so it is the one to save. `pack_nm` makes it, `quantize_packed` the one
    with int8 values.

    Attributes:
        values: `[..., R, K * N / M]`, the N kept elements of every M, in order; int8 from -127 to 127 with `scales`.
        mask: uint8 `[..., R, K / 8]`, a bit for each element, the first one lowest (`pack_bits`): 1 where it is kept.
        scales: None, or `[..., R, ceil(K / 128)]` in the dtype of the matrix, finite and never negative: one for each
            row and 128 consecutive elements, the last of which may be fewer. An element is its value times its scale,
            rounded once to that dtype.
        m: M, the size of a group.
    """

    values: Tensor
    mask: Tensor
    scales: Tensor | None = None
    m: int = 4

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrix, which `unpack_nm` gives."""
        return self.values.dtype if self.scales is None else self.scales.dtype

    @property
    def columns(self) -> int:
        """K."""
        return 8 * self.mask.shape[-1]

    @property
    def pattern(self) -> Pattern:
        """N:M."""
        return Pattern(self.values.shape[-1] * self.m // self.columns, self.m)

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> "Packed":
        """The matrix in another dtype, in which int8 values stay and their scales change.

        Args:
            dtype: a floating one.
            device: to move it to; None where it is.

        Returns:
            The packed matrix; tensors that are so already are the same ones.
        """
        if dtype == self.dtype and device in (None, self.values.device):  # as in every call of a layer
            return self
        values, mask = self.values.to(device=device), self.mask.to(device=device)
        if self.scales is None:
            return self._replace(values=values.to(dtype), mask=mask)
        return self._replace(values=values, mask=mask, scales=self.scales.to(dtype=dtype, device=device))


STEP = 64
"""Elements of a row that kernels expand at a time: M divides it, so that every step has as many values."""


def unpackable(pattern: Pattern, k: int) -> str | None:
    """Why a row of `k` elements of a pattern has no packed form, or None where it has one."""
    if STEP % pattern.m:
        return f"M of a packed {pattern} must divide {STEP}"
    if k % 8 or k % pattern.m:
        return f"rows of a packed {pattern} have multiples of {max(8, pattern.m)} elements, not {k}"
    return None


FORMS = {"dense": None, "transposed": None, "packed": 1, "packed-transposed": 0, "sm90": 1, "sm90-transposed": 0}
"""Forms of a pruned matrix `[R, C]`, one tensor each, and along which dimension the packed and sm90 ones are 2:4.

* `"transposed"` is the dense `[C, R]`, row-major.
* `"packed"` is fp32 `[R, C * 17 / 32]`: all values, two of every four, then the mask's bits (see `split_operand`).
* `"sm90"` is bf16 or fp16 `[R, C * 9 / 16]`: all values, then their places in the order of the sparse tensor cores of
  compute capability 9.0 (see `reference.packed.for_sm90`). Of more than two in a group, NaN or not, the last two stay.
* `"packed-transposed"` and `"sm90-transposed"` are those of the transpose.
"""

OPERAND_MULTIPLE = 32
"""Packed forms need K % 32 == 0."""

SM90_MULTIPLE = 64
"""sm90 needs both sizes % 64 == 0."""


def form_shape(form: str, shape: torch.Size) -> Sequence[int]:
    """The shape of a matrix of `shape` in one of `FORMS`; `"dense"` takes tensors of any dimension."""
    if form == "dense":
        return shape
    rows, columns = shape[::-1] if "transposed" in form else shape
    stored = {"packed": columns // 2 + columns // 32, "sm90": columns // 2 + columns // 16}
    return rows, stored.get(form.removesuffix("-transposed"), columns)


def turned(form: str) -> str:
    """The form of the transpose: what is `"packed"` of a matrix is `"packed-transposed"` of its transpose."""
    if form in ("dense", "transposed"):
        return "transposed" if form == "dense" else "dense"
    return form.removesuffix("-transposed") if "transposed" in form else f"{form}-transposed"


def split_operand(operand: Tensor) -> tuple[Tensor, Tensor]:
    """The values `[R, K/2]` and the mask `[R, K/8]` of a packed form: views."""
    rows, k = len(operand), operand.shape[1] * 32 // 17
    values, mask = operand.view(-1).split([rows * k // 2, rows * k // 32])
    return values.view(rows, k // 2), mask.view(torch.uint8).view(rows, k // 8)


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
