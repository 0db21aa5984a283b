"""Numbers to watch a sparse training run by: tensors in, numbers out."""

import re
from functools import cache
from math import comb, factorial, prod

import torch
from torch import Tensor


def flip_rate(old_mask: Tensor, new_mask: Tensor) -> float:
    """Share of weights that entered or left the mask: `||m_k xor m_{k-1}||_1 / d`, 0 to 1.

    A swapped pair counts as two. In a healthy run the rate rises, then fades towards 0.

    Args:
        old_mask, new_mask: bool, same shape, of any size above 0.

    Raises:
        ValueError: different shapes, or a dtype other than bool.

    Reference: Hu et al. 2024 (arXiv 2404.01847), section 3; S-STE (arXiv 2409.09099), section 3.2.
    """
    if old_mask.dtype != torch.bool or new_mask.dtype != torch.bool or old_mask.shape != new_mask.shape:
        raise ValueError(
            f"flip_rate needs two bool masks of one shape, got {old_mask.dtype} {tuple(old_mask.shape)} "
            f"and {new_mask.dtype} {tuple(new_mask.shape)}"
        )
    return (old_mask ^ new_mask).float().mean().item()


def kept_magnitude(weight: Tensor, mask: Tensor) -> float:
    """Share of the L1 norm that the mask keeps, 0 to 1: 0.745 for 2:4 by rows on Gaussian weights, 0.703 transposable.

    Args:
        weight: any shape. mask: bool, same shape.
    """
    magnitude = weight.float().abs()
    return (magnitude * mask).sum().item() / max(magnitude.sum().item(), torch.finfo(torch.float32).tiny)


def is_nm_sparse(tensor: Tensor, n: int = 2, m: int = 4, dim: int = -1) -> bool:
    """Whether every group of `m` consecutive elements along `dim` has at most `n` non-zeros.

    False too where `m` does not divide the size of `dim`: such a tensor has no N:M layout.
    """
    if tensor.shape[dim] % m:
        return False
    groups = (tensor != 0).unflatten(dim, (-1, m))
    return bool((groups.sum(dim if dim < 0 else dim + 1) <= n).all())


def mask_diversity(pattern: str, numel: int, transposable: bool | str = False) -> int:
    """How many masks a pattern allows for `numel` weights (Hubara et al. 2021, section 2), as an exact integer.

    Args:
        pattern: `"N:M"`.
        numel: number of weights, a multiple of M (of M^2 where transposable).
        transposable: `False` for N of every M along one dimension: `C(M, N)` per group. `True` for the true number of
            M x M tiles with N in every row and column: 90 for 2:4, 116 963 796 250 for 4:8. `"formula"` for the
            paper's `M! (M-1)! ... (M-N+1)!` per tile, which counts too much (144 for 2:4, 1.7e13 for 4:8): by it 4:8
            transposable masks are more diverse than plain 2:4 ones, by the true count they are not.

    Raises:
        ValueError: a malformed pattern, or a `numel` that is no multiple.
    """
    match = re.fullmatch(r"(\d+):(\d+)", pattern)
    if match is None or not 0 < int(match[1]) < int(match[2]):
        raise ValueError(f"pattern={pattern!r}: must be 'N:M' with 0 < N < M, such as '2:4'")
    n, m = int(match[1]), int(match[2])
    unit = m * m if transposable else m
    if numel % unit:
        raise ValueError(f"numel={numel}: must be a multiple of {unit}")
    if not transposable:
        ways = comb(m, n)
    elif transposable == "formula":
        ways = prod(factorial(m - i) for i in range(n))
    else:
        ways = _matrices(tuple([n] * m), n)
    return ways ** (numel // unit)


@cache
def _matrices(wanted: tuple[int, ...], n: int) -> int:
    """How many 0/1 matrices with n ones per row have the column sums `wanted`, filling row by row.

    Only how often each sum is wanted matters, so `wanted` is kept sorted: 4:8 takes a few hundred states.
    """
    rows_left = sum(wanted) // n
    if rows_left == 0:
        return 1
    counts = {value: wanted.count(value) for value in set(wanted)}

    def choose(values: list[int], ones: int, taken: dict[int, int]) -> int:
        if not values:
            if ones:
                return 0
            rest = [v - (i < taken[v]) for v in counts for i in range(counts[v])]
            return _matrices(tuple(sorted(rest)), n)
        value = values[0]
        return sum(
            comb(counts[value], k) * choose(values[1:], ones - k, taken | {value: k})
            for k in range(min(ones, counts[value]) + 1)
            if value > 0 or k == 0
        )

    return choose(sorted(counts), n, {})
