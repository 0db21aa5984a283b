"""MVUE by the kernels for CPUs: the exact 2:4 estimate; everything else by the reference."""

from torch import Tensor

from .. import reference
from ..formats import FORMS, form_shape
from .memory import reused_memory
from .prune import in_form, run


def mvue(x: Tensor, key: Tensor, n: int, m: int, dim: int, estimator: str, form: str) -> Tensor:
    """Draw the estimate of `x` that `key` determines, in one of `FORMS`; `dim` is not negative."""
    if (n, m, estimator) != (2, 4, "exact"):
        estimate = reference.mvue.mvue(x, key, n, m, dim, estimator, "dense")
        return in_form(estimate, form)
    is_packed = FORMS[form] is not None
    estimate = reused_memory(form_shape(form, x.shape) if is_packed else x.shape, x.dtype)
    run("mvue", x, estimate, dim, key=int(key), is_packed=is_packed)
    return estimate if is_packed else in_form(estimate, form)
