"""MVUE: random N:M estimates of a gradient, unbiased, with the least variance."""

import torch
from torch import Tensor

from . import cusparselt
from .backends import implementation
from .checks import check_compressible, check_dim, check_dtype
from .layout import known_layout
from .prune import Packed, empty_packed

FORMS = ("dense", "transposed", "packed", "compressed")

_ESTIMATORS = [(2, 4, "exact"), (2, 4, "approx"), (1, 2, "exact")]


def mvue(
    x: Tensor,
    n: int = 2,
    m: int = 4,
    dim: int = -1,
    estimator: str = "exact",
    generator: torch.Generator | None = None,
    *,
    key: Tensor | int | None = None,
    form: str = "dense",
) -> Tensor | Packed:
    """A random n:m tensor whose expectation is `x`: the minimum-variance unbiased estimate.

    Args:
        x: any shape and size; a last group that is not full is treated as if padded with zeros.
        n, m: 2:4 or 1:2.
        dim: the dimension that groups run along.
        estimator: `"exact"` has the least variance an n:m tensor can have; `"approx"` is the paper's cheaper 2:4
            formula, at most twice that, kept for comparison.
        generator: fixes the draw, as in `torch.rand`.
        key: int64 scalar tensor (or an int) that fixes the draw by itself, on every device: the random numbers are
            Philox 4x32-7 of the key and the place in `x`. Overrides `generator`. Both None draws a key from torch's
            global generator.
        form: `"dense"`; or, for a matrix, `"transposed"`, the transpose of that in row-major order; or, for 2:4,
            `"packed"` or `"compressed"` with rows that run along `dim`, as in `prune_forms`.

    Returns:
        Same shape and dtype (but for `form`), at most n non-zeros in every m. All-zero groups stay zero; never -0.0.
        Not differentiable. Random numbers have 24 bits, so an element below 2^-24 of its group is kept about as often
        as one of that size, or never; a value is up to the sum of its group, which fp16 may not hold.

    Raises:
        ValueError: another pattern, an estimator the pattern does not have, or a form that `x` cannot take.

    Reference: Chmiel et al. (arXiv 2203.10991), section 4: the inclusion probabilities `pi_i = min(1, c |x_i|)`,
    `sum pi = n`, and value `x_i / pi_i`. Our deviation: the two elements of 2:4 are drawn by systematic sampling from
    one uniform number per group, where the paper tabulates cases and others ship the two-draw approximation; the
    probabilities and the variance are the optimal ones. Relative variance on Gaussian groups: 0.474 (2:4 exact), 0.502
    (approx), 0.636 (1:2).
    """
    if (n, m, estimator) not in _ESTIMATORS:
        known = ", ".join(f"{n}:{m} {estimator}" for n, m, estimator in _ESTIMATORS)
        raise ValueError(f"mvue has no {n}:{m} {estimator!r} estimator; it has {known}")
    check_dtype("mvue", x)
    dim = check_dim("mvue", x, dim)
    if form not in FORMS:
        raise ValueError(f"form={form!r}: must be one of {list(FORMS)}")
    if form != "dense" and x.dim() != 2:
        raise ValueError(f"form={form!r} needs a matrix, got shape {tuple(x.shape)}")
    if form in ("packed", "compressed") and ((n, m) != (2, 4) or x.shape[dim] % 8):
        raise ValueError(f"only 2:4 is {form}, and a multiple of 8 along dim, got {n}:{m} and {x.shape[dim]}")
    if form == "compressed":
        check_compressible("mvue", x if dim == 1 else x.t(), x.dtype)
    if key is None:
        device = generator.device if generator is not None else x.device
        key = torch.randint(torch.iinfo(torch.int64).max, (), generator=generator, device=device)
    elif isinstance(key, int):
        key = torch.tensor(key, dtype=torch.int64, device=x.device)
    elif key.dtype != torch.int64 or key.dim():
        raise ValueError(f"mvue: key is an int or an int64 0-d tensor, got {key.dtype} {tuple(key.shape)}")
    # Beside x, however it came: a kernel reads it there, so that nobody waits for a copy to the host.
    results = _mvue(x, key.to(x.device), n, m, dim, estimator, form)
    return Packed(*results) if form == "packed" else results[0]


@torch.library.custom_op("sparse24::mvue", mutates_args=())
def _mvue(x: Tensor, key: Tensor, n: int, m: int, dim: int, estimator: str, form: str) -> list[Tensor]:
    room = implementation(x)
    if form != "compressed":
        return room.mvue.mvue(x, key, n, m, dim, estimator, form)
    rows, size = x.shape if dim == 1 else x.shape[::-1]
    layout = known_layout(rows, size, x.dtype, x.device)
    if layout:
        return room.mvue.mvue(x, key, n, m, dim, estimator, form, layout)
    (estimate,) = room.mvue.mvue(x, key, n, m, dim, estimator, "dense" if dim == 1 else "transposed")
    return [cusparselt.compress(estimate)]


@_mvue.register_fake
def _(x: Tensor, key: Tensor, n: int, m: int, dim: int, estimator: str, form: str) -> list[Tensor]:
    if form in ("packed", "compressed"):
        return empty_packed(x if dim == 1 else x.t(), x.dtype, form == "compressed")
    return [x.new_empty(x.shape if form == "dense" else x.shape[::-1])]
