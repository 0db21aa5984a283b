"""MVUE by the kernels for CPUs: the exact 2:4 estimate, dense or transposed; everything else by the reference."""

from torch import Tensor

from .. import reference
from ..formats import Layout
from .prune import run


def mvue(
    x: Tensor,
    key: Tensor,
    n: int,
    m: int,
    dim: int,
    estimator: str,
    form: str,
    layout: Layout | None = None,
) -> list[Tensor]:
    """Draw the estimate of `x` that `key` determines, in one form; `dim` is not negative."""
    if (n, m, estimator) != (2, 4, "exact") or form not in ("dense", "transposed"):
        return reference.mvue.mvue(x, key, n, m, dim, estimator, form, layout)
    estimate = x.new_empty(x.shape)
    run("mvue", x, estimate, dim, key=int(key))
    return [estimate if form == "dense" else estimate.t().contiguous()]
