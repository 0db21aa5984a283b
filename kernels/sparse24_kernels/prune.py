"""Pruning by magnitude, by a mask, or by S-STE's soft threshold, dense and transposed; the scale of that threshold."""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import reference
from .checks import (
    INPUTS,
    check_device,
    check_floating,
    check_form,
    check_groups,
    check_is,
    check_mask,
    check_matrix,
    check_one_of,
    check_pattern,
    described,
)
from .dispatch import implementation
from .formats import FORMS, form_shape
from .operators import Pruning, not_differentiable, register

RULES = ("magnitude", "mask", "soft-threshold")
SCALE_RULES = ("mse", "l1", "none")
"""Names of the rules for S-STE's scale; see `s_ste_scale`."""


def nm_prune(weight: Tensor, n: int = 2, m: int = 4, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """Keep the `n` largest magnitudes of each group of `m`: `apply_mask(weight, nm_mask(weight, ...))` in one pass.

    Not differentiable.

    Args:
        weight: fp64, fp32, bf16 or fp16, any shape; the size of `dim` must be a multiple of `m`.
        n: entries to keep of each group, 0 < n < m.
        m: size of a group.
        dim: the dimension that groups run along.
        dtype: of the result, None for that of `weight`.

    Returns:
        Shape of `weight`; the dropped entries are +0.0. Ties keep the lower index, NaN counts as largest.

    Raises:
        ValueError: a pattern outside 0 < n < m, a size that `m` does not divide, or another dtype.

    Reference: SR-STE (arXiv 2102.04010), section 3.

    Examples:
        >>> nm_prune(torch.tensor([0.1, -3.0, 2.0, 1.0]))
        tensor([ 0., -3.,  2.,  0.])
    """
    return _checked("nm_prune", weight, dtype, Pruning("magnitude", n, m, dim))[0]


def apply_mask(weight: Tensor, mask: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`weight` where `mask` is true and +0.0 elsewhere, never -0.0; NaN and inf show even there. Not differentiable.

    Args:
        weight: fp64, fp32, bf16 or fp16, any shape.
        mask: bool of that shape, or its packed bits (`pack_bits`).
        dtype: of the result, None for that of `weight`.

    Returns:
        Shape of `weight`.

    Raises:
        ValueError: a mask of another shape or dtype, or on another device.

    Examples:
        >>> apply_mask(torch.tensor([1.0, 2.0]), torch.tensor([False, True]))
        tensor([0., 2.])
    """
    return _checked("apply_mask", weight, dtype, Pruning("mask", mask=mask))[0]


def soft_threshold(
    weight: Tensor, n: int = 2, m: int = 4, dim: int = -1, scale: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """S-STE's continuous pruning: `sign(w) * max(|w| - t, 0) * scale`, t the (m-n)-th smallest magnitude of the group.

    Args:
        weight: fp64, fp32, bf16 or fp16, any shape; the size of `dim` must be a multiple of `m`.
        n: entries to keep of each group, 0 < n < m.
        m: size of a group.
        dim: the dimension that groups run along.
        scale: floating 0-d tensor that multiplies the result (see `s_ste_scale`), or None for 1.
        dtype: of the result; None for that of `weight`.

    Returns:
        Same shape; at most `n` non-zeros in every `m`, and fewer at ties, which makes it continuous; never -0.0.
        Computed in fp32, an fp64 weight in fp64. A NaN makes its group of 2:4 NaN. Not differentiable: S-STE's gradient
        goes straight through.

    Raises:
        ValueError: a pattern outside 0 < n < m, or a size that `m` does not divide.

    Reference: S-STE (arXiv 2409.09099), section 4.1, with gamma = 0.

    Examples:
        >>> soft_threshold(torch.tensor([4.0, -3.0, 2.0, 1.0]))
        tensor([ 2., -1.,  0.,  0.])
    """
    return _checked("soft_threshold", weight, dtype, Pruning("soft-threshold", n, m, dim, scale=scale))[0]


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
    dim = check_groups("s_ste_scale", weight, m, dim)
    return weight.new_ones((), dtype=torch.float32) if rule == "none" else _s_ste_scale(weight, n, m, dim, rule)


def prune_forms(
    weight: Tensor,
    forms: Sequence[str],
    rule: str = "magnitude",
    n: int = 2,
    m: int = 4,
    dim: int = -1,
    *,
    mask: Tensor | None = None,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Prune a matrix `[R, C]`, and write it in several forms in one pass: a tensor for each, in their order.

    `forms` are of `formats.FORMS`: `"dense"`, `"transposed"` (`[C, R]`, row-major), and where the result is 2:4 along
    them the operands of GEMMs: `"packed"` on CPUs, `"sm90"` on Hopper, and their `-transposed`. `rule` is
    `"magnitude"`, `"soft-threshold"` (with `scale`) or `"mask"` (with `mask`). ValueError: an unknown rule or form, or
    arguments that do not fit.
    """
    check_is(Tensor, "prune_forms", weight=weight)
    check_matrix("prune_forms", weight=weight)
    check_one_of(RULES, rule=rule)
    if not isinstance(forms, (list, tuple)) or not forms or any(forms.count(form) > 1 for form in forms):
        raise ValueError(f"forms={forms!r}: must be a list of different forms of {list(FORMS)}")
    return _checked("prune_forms", weight, dtype, Pruning(rule, n, m, dim, mask, scale, forms=forms))


def _checked(name: str, weight: Tensor, dtype: torch.dtype | None, how: Pruning) -> list[Tensor]:
    """Prune a weight to `dtype`, None for its own. ValueError: arguments that do not fit."""
    if how.rule == "mask":
        if how.mask is None:
            raise ValueError(f"{name}: rule='mask' needs a mask")
        check_floating(name, weight=weight)
        check_mask(name, how.mask, weight)
        check_device(name, weight, how.mask)
        groups, dim = None, max(weight.dim() - 1, 0)  # an elementwise rule has no groups
    else:
        if how.mask is not None:
            raise ValueError(f"{name}: rule={how.rule!r} makes its own mask; leave mask out or choose rule='mask'")
        check_pattern(name, how.n, how.m)
        groups = dim = check_groups(name, weight, how.m, how.dim)
    if how.scale is not None:
        if how.rule != "soft-threshold":
            raise ValueError(f"{name}: rule={how.rule!r} has no scale")
        check_is(Tensor, name, scale=how.scale)
        if how.scale.dim() or not how.scale.is_floating_point():
            found = f"{how.scale.dtype} {tuple(how.scale.shape)}"
            raise ValueError(f"{name}: scale is a floating 0-d tensor, got {found}")
        check_device(name, weight, how.scale)
    dtype = weight.dtype if dtype is None else dtype
    if dtype not in INPUTS:
        raise ValueError(f"{name}: dtype={described(dtype)}: must be one of {[str(result) for result in INPUTS]}")
    for form in how.forms:
        check_form(name, form, weight, groups, dtype)
    made = not_differentiable(_prune, weight, *how._replace(dim=dim, dtype=dtype, forms=",".join(how.forms)))
    return list(made)


def mask_gradient(grad: Tensor, mask: Tensor) -> Tensor:
    """`apply_mask` for the backward pass of layers: without checks, and called without gradients."""
    return _prune(grad, "mask", 2, 4, grad.dim() - 1, mask, None, grad.dtype, "dense")[0]


@register(
    "sparse24::prune",
    lambda weight, rule, n, m, dim, mask, scale, dtype, forms: [
        weight.new_empty(form_shape(form, weight.shape), dtype=dtype) for form in forms.split(",")
    ],
)
def _prune(
    weight: Tensor,
    rule: str,
    n: int,
    m: int,
    dim: int,
    mask: Tensor | None,
    scale: Tensor | None,
    dtype: torch.dtype,
    forms: str,  # with commas: a schema has no list of strings
) -> list[Tensor]:
    return implementation("prune", weight)(weight, Pruning(rule, n, m, dim, mask, scale, dtype, forms.split(",")))


@torch.library.custom_op("sparse24::s_ste_scale", mutates_args=())
def _s_ste_scale(weight: Tensor, n: int, m: int, dim: int, rule: str) -> Tensor:
    return reference.prune.s_ste_scale(_near_one(weight), n, m, dim, rule)


def _near_one(weight: Tensor) -> Tensor:
    """The weight, times a power of two where sums of its squares might leave fp32; the scale is the same for both."""
    if not weight.numel():
        return weight
    largest = torch.stack(torch.aminmax(weight)).abs().max().double().nan_to_num(nan=1.0, posinf=1.0)
    exponent = largest.frexp().exponent
    most = 1022 if weight.dtype == torch.float64 else 126
    factor = torch.where(exponent.abs() <= 40, 1.0, torch.exp2(-exponent.clamp(-most, most).double())).to(weight.dtype)
    # To look at the factor on a GPU would wait for it, which a captured graph cannot.
    return weight if weight.is_cpu and factor == 1 else weight * factor


_s_ste_scale.register_fake(lambda weight, *settings: weight.new_empty((), dtype=torch.float32))
