"""The product with one sparse operand: the seam for sparse tensor cores."""

import torch
from torch import Tensor

from .backends import choose_backend


def sparse_mm(a: Tensor, b: Tensor, bias: Tensor | None = None, *, sparse: str, backend: str = "auto") -> Tensor:
    """`a @ b (+ bias)` where one operand is 2:4 sparse along the contraction.

    Args:
        a: `[..., K]`, the left operand. b: `[K, N]`, the right one, any strides. bias: `[N]` or None.
        sparse: `"left"` or `"right"`: which operand holds at most two non-zeros in every four along K. It is trusted,
            not checked.
        backend: `"auto"`, or one of `BACKENDS`.

    Returns:
        `[..., N]` in the operands' dtype.

    Raises:
        ValueError: an unknown `backend` or `sparse`.
    """
    if sparse not in ("left", "right"):
        raise ValueError(f"sparse must be 'left' or 'right', got {sparse!r}")
    choose_backend(backend, a.device)
    # Written as F.linear so that a model gives the same bits before and after its layers are unpatched.
    return torch.nn.functional.linear(a, b.t(), bias)
