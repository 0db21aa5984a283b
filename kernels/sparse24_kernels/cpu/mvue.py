"""MVUE by the kernels for CPUs: the exact 2:4 estimate; everything else by the reference."""

from torch import Tensor

from .. import reference
from ..formats import FORMS
from .memory import reused_memory
from .prune import in_form, packed, run


def mvue(x: Tensor, key: Tensor, n: int, m: int, dim: int, estimator: str, form: str) -> Tensor:
    """Draw the estimate of `x` that `key` determines, in one of `FORMS`; `dim` is not negative."""
    if (n, m, estimator) != (2, 4, "exact"):
        return in_form(reference.mvue.mvue(x, key, n, m, dim, estimator, "dense"), form)
    if FORMS[form] is not None:
        return packed(x, "mvue", form, key=int(key))
    estimate = reused_memory(x.shape, x.dtype)
    run("mvue", x, estimate, dim, key=int(key))
    return in_form(estimate, form)
