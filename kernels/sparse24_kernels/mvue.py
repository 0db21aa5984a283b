"""MVUE: random N:M estimates of a gradient, unbiased, with the least variance."""

import torch
from torch import Tensor

from .checks import check_dim, check_floating, check_form, check_is, described
from .dispatch import implementation
from .formats import form_shape
from .operators import not_differentiable, register

_ESTIMATORS = [(2, 4, "exact"), (2, 4, "approx"), (1, 2, "exact")]


def mvue(
    x: Tensor,
    n: int = 2,
    m: int = 4,
    dim: int = -1,
    estimator: str = "exact",
    *,
    key: Tensor | int | None = None,
    form: str = "dense",
) -> Tensor:
    """A random n:m tensor whose expectation is `x`: the minimum-variance unbiased estimate.

    Args:
        x: fp64, fp32, bf16 or fp16, any shape and size; an incomplete last group is treated as padded with zeros.
        n: entries to keep of each group: 2 of 4, or 1 of 2.
        m: size of a group, 4 or 2.
        dim: the dimension that groups run along.
        estimator: `"exact"` has the least variance that an n:m tensor can have; `"approx"` is the paper's cheaper 2:4
            formula with at most twice that variance, for comparisons.
        key: int64 scalar tensor (or an int) that determines the draw, on every device alike: the random numbers are
            Philox 4x32-7 of the key and the position in `x`. None: drawn from torch's global generator.
        form: `"dense"`; of a matrix also the others of `formats.FORMS`.

    Returns:
        Same shape and dtype (except for `form`), at most n non-zeros in every m. All-zero groups stay zero; never -0.0.
        Not differentiable. Computed in fp32, fp64 in fp64. Random numbers have 24 bits, so an element below 2^-24 of
        its group's sum is kept about as often as one of that size, or never. A value is at most the sum of its group,
        which may overflow fp16.

    Raises:
        ValueError: another pattern, an estimator the pattern does not have, or a form that `x` cannot take.

    Reference: Chmiel et al. (arXiv 2203.10991), section 4: the inclusion probabilities `pi_i = min(1, c |x_i|)`,
    `sum pi = n`, and value `x_i / pi_i`. Our deviation: we draw the two elements of 2:4 by systematic sampling from one
    uniform number per group, where the paper tabulates cases and other implementations use the two-draw approximation;
    probabilities and variance are the optimal ones. Relative variance on Gaussian groups: 0.474 (2:4 exact), 0.502
    (approx), 0.636 (1:2).

    Examples:
        >>> x = torch.tensor([4.0, 3.0, 2.0, 1.0])
        >>> mvue(x, key=0).count_nonzero()
        tensor(2)
        >>> mean = torch.stack([mvue(x, key=key) for key in range(2000)]).mean(0)
        >>> torch.allclose(mean, x, atol=0.2)
        True
    """
    check_floating("mvue", x=x)
    check_is(int, "mvue", n=n, m=m)
    if (n, m, estimator) not in _ESTIMATORS:
        known = ", ".join(f"{n}:{m} {estimator}" for n, m, estimator in _ESTIMATORS)
        raise ValueError(f"mvue has no {n}:{m} {estimator!r} estimator; it has {known}")
    dim = check_dim("mvue", x, dim)
    check_form("mvue", form, x, dim, x.dtype)
    # On the device of x, where the kernel reads it: a copy to the host would synchronise.
    return not_differentiable(_mvue, x, _key(key, x.device).to(x.device), n, m, dim, estimator, form)


def mvue_unchecked(x: Tensor, n: int, m: int, dim: int, estimator: str, key: Tensor | None, form: str) -> Tensor:
    """What `mvue` gives, for layers, which call it without gradients; `dim` is not negative."""
    return _mvue(x, _key(key, x.device).to(x.device), n, m, dim, estimator, form)


def _key(key: Tensor | int | None, device: torch.device) -> Tensor:
    largest = torch.iinfo(torch.int64).max
    if key is None:
        return torch.randint(largest, (), device=device)
    if isinstance(key, Tensor) and key.dtype == torch.int64 and not key.dim():
        return key
    if isinstance(key, int) and not isinstance(key, bool) and -largest - 1 <= key <= largest:
        return torch.tensor(key, dtype=torch.int64, device=device)
    raise ValueError(f"mvue: key={described(key)}: must be an int of 64 bits or an int64 0-d tensor")


@register("sparse24::mvue", lambda x, *how: x.new_empty(form_shape(how[-1], x.shape)))
def _mvue(x: Tensor, key: Tensor, n: int, m: int, dim: int, estimator: str, form: str) -> Tensor:
    return implementation("mvue", x)(x, key, n, m, dim, estimator, form)
