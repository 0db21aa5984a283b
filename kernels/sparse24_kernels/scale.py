"""The scale of S-STE's soft threshold."""

import math

import torch
from torch import Tensor

from .checks import check_groups, check_one_of, check_pattern
from .dispatch import implementation

SCALE_RULES = ("mse", "l1", "none")
"""Names of the rules for S-STE's scale; see `s_ste_scale`."""


def s_ste_scale(weight: Tensor, n: int = 2, m: int = 4, dim: int = -1, rule: str = "mse") -> Tensor:
    """S-STE's beta, the factor of S(W), the soft threshold of W.

    Args:
        weight: fp64, fp32, bf16 or fp16, any shape; the size of `dim` must be a multiple of `m`.
        n: entries to keep of each group, 0 < n < m.
        m: size of a group.
        dim: the dimension that groups run along.
        rule: `"mse"` minimises `||W - beta * S(W)||^2`, so beta is `<W, S(W)> / ||S(W)||^2`; `"l1"` keeps the L1 norm,
            `||W||_1 / ||S(W)||_1`; `"none"` is 1.

    Returns:
        fp32 scalar on the weight's device, computed in fp32, of an fp64 weight in fp64. For Gaussian weights 1.483
        (mse) and 2.512 (l1), for uniform ones 1.751 (mse). 1 where S(W) is all zeros: every beta gives the same there,
        and the paper's formula divides by zero.

    Raises:
        ValueError: a pattern outside 0 < n < m, a size that `m` does not divide, or an unknown rule.

    Reference: S-STE (arXiv 2409.09099), section 4.2 and Table 2, where "minimise MSE" is chosen. The paper does not say
    which L1 norm is kept; ours is that of the dense weight.

    Examples:
        >>> weight = torch.tensor([4.0, -3.0, 2.0, 1.0])
        >>> s_ste_scale(weight)
        tensor(2.2000)
    """
    check_pattern("s_ste_scale", n, m)
    check_one_of(SCALE_RULES, rule=rule)
    return _s_ste_scale(weight, n, m, check_groups("s_ste_scale", weight, m, dim), rule)


@torch.library.custom_op("sparse24::s_ste_scale", mutates_args=())
def _s_ste_scale(weight: Tensor, n: int, m: int, dim: int, rule: str) -> Tensor:
    return implementation("s_ste_scale", weight, (n, m) == (2, 4))(_near_one(weight), n, m, dim, rule)


def _near_one(weight: Tensor) -> Tensor:
    """The weight, times a power of two where sums of its squares might leave fp32; the scale is the same for both."""
    largest = float(torch.stack(torch.aminmax(weight)).abs().max()) if weight.numel() else 1.0
    exponent = math.frexp(largest)[1]  # 0 of inf and NaN
    return weight if abs(exponent) <= 40 else weight * 2.0 ** max(-126, min(126, -exponent))


@_s_ste_scale.register_fake
def _(weight: Tensor, n: int, m: int, dim: int, rule: str) -> Tensor:
    return weight.new_empty((), dtype=torch.float32)
