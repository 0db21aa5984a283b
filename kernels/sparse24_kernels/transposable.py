"""Transposable masks: n:m along rows and along columns at once."""

import torch
from torch import Tensor

from . import reference
from .checks import check_floating, check_is, check_one_of, check_pattern
from .dispatch import implementation
from .formats import empty_mask

SOLVERS = ("exact", "min-cost-flow", "greedy", "two-approx")
"""Names of the solvers for transposable masks; see `transposable_mask`."""


def transposable_mask(weight: Tensor, n: int = 2, m: int = 4, solver: str = "exact", packed: bool = False) -> Tensor:
    """The mask that is n:m along rows and along columns and keeps as much of the L1 norm as the solver can.

    Args:
        weight: `[R, C]`, both multiples of `m`. The m x m tiles are those of the matrix itself, so the mask of W is the
            mask of W^T (the public code of Hubara et al. cuts 64 consecutive weights of a row instead).
        n: entries to keep in every row and column of a tile, 0 < n < m.
        m: size of a group, and of a tile's rows and columns.
        solver: `"exact"` is the optimum: 2:4 over all 90 patterns, any other by `"min-cost-flow"` (needs OR-tools).
            `"greedy"` keeps the largest that still fits; `"two-approx"` is the paper's 2-approximation, which prunes
            the smallest. Both are fast, any pattern, any device, and keep less.
        packed: return the mask as packed bits, those of `pack_bits`.

    Returns:
        bool `[R, C]`. The optimal solvers keep exactly n in every row and column of every tile; the others at most n.
        Among equal optima the first in a fixed order is taken, which for equal weights keeps the lower indices
        (min-cost-flow: any of them).

    Raises:
        ValueError: not a matrix, a size that `m` does not divide, or an unknown solver.
        ImportError: min-cost-flow without OR-tools.

    Reference: Hubara et al. 2021 (arXiv 2102.08124), section 3 and Algorithm 1; Hu et al. 2024 (arXiv 2404.01847),
    Algorithm 1 for the 90 patterns. Ours scores in fp32 (an fp64 weight in fp64), where two sums may round to a
    tie, and uses 2.1e37 for inf, NaN and larger magnitudes; theirs may score in TF32. Their public dynamic code
    calls a greedy sweep that keeps "2-approximation"; here the two have different names.

    Examples:
        >>> mask = transposable_mask(torch.randn(4, 8))
        >>> mask.sum(1), mask.sum(0)
        (tensor([4, 4, 4, 4]), tensor([2, 2, 2, 2, 2, 2, 2, 2]))
    """
    check_pattern("transposable_mask", n, m)
    check_floating("transposable_mask", weight=weight)
    check_is(bool, "transposable_mask", packed=packed)
    check_one_of(SOLVERS, solver=solver)
    if weight.dim() != 2 or weight.shape[0] % m or weight.shape[1] % m:
        raise ValueError(f"transposable_mask needs a matrix, both sizes multiples of {m}, got {tuple(weight.shape)}")
    return _transposable_mask(weight, n, m, solver, packed)


@torch.library.custom_op("sparse24::transposable_mask", mutates_args=())
def _transposable_mask(weight: Tensor, n: int, m: int, solver: str, packed: bool) -> Tensor:
    if (n, m, solver) != (2, 4, "exact"):  # no kernel has these
        return reference.transposable.transposable_mask(weight, n, m, solver, packed)
    return implementation("transposable_mask", weight)(weight, n, m, solver, packed)


_transposable_mask.register_fake(lambda weight, n, m, solver, packed: empty_mask(weight, packed))
