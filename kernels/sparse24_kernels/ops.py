"""The public functions: arguments checked, then sent to an implementation.

All take tensors of any floating dtype and leave their inputs alone unless the name ends in `_`. Groups of M lie along
`dim`, by default the last, which for a weight `[out, in]` is the input dimension.
"""

import torch
from torch import Tensor

from . import fp8, gated, reference, transposable
from .backends import choose_backend

SOLVERS = ("exact", "min-cost-flow", "greedy", "two-approx")
SCALE_RULES = ("mse", "l1", "none")


def _check_pattern(n: int, m: int) -> None:
    if not 0 < n < m:
        raise ValueError(f"an n:m pattern keeps n of m with 0 < n < m, got {n}:{m}")


def _check_groups(name: str, tensor: Tensor, m: int, dim: int) -> None:
    if tensor.shape[dim] % m:
        raise ValueError(f"{name}: dimension {dim} of shape {tuple(tensor.shape)} must be a multiple of {m}")


def nm_mask(weight: Tensor, n: int = 2, m: int = 4, dim: int = -1) -> Tensor:
    """Mark the `n` largest magnitudes in each group of `m` along `dim`.

    Args:
        weight: any shape; the size of `dim` must be a multiple of `m`.
        n, m: the pattern, 0 < n < m.
        dim: the dimension that groups run along.

    Returns:
        bool, shape of `weight`, exactly `n` of every `m` true. Ties keep the lower index, NaN counts as largest.

    Raises:
        ValueError: a pattern outside 0 < n < m, or a size that `m` does not divide.

    Reference: SR-STE (arXiv 2102.04010), section 3.
    """
    _check_pattern(n, m)
    _check_groups("nm_mask", weight, m, dim)
    return reference.nm_mask(weight, n, m, dim)


def apply_mask(weight: Tensor, mask: Tensor) -> Tensor:
    """`weight` where `mask` (bool, same shape) and +0.0 elsewhere, never -0.0; NaN and inf show even there."""
    return reference.apply_mask(weight, mask)


def soft_threshold(weight: Tensor, n: int = 2, m: int = 4, dim: int = -1, scale: Tensor | None = None) -> Tensor:
    """S-STE's continuous pruning: `sign(w) * max(|w| - t, 0) * scale`, t the (m-n)-th smallest magnitude of the group.

    Args:
        weight: any shape; the size of `dim` must be a multiple of `m`.
        n, m, dim: the pattern and the dimension of its groups.
        scale: 0-d tensor that multiplies the result (see `s_ste_scale`), or None for 1.

    Returns:
        Same shape and dtype; at most `n` non-zeros in every `m`, fewer at ties (that is what makes it continuous);
        never -0.0. Computed in fp32. A NaN makes NaN.

    Raises:
        ValueError: a pattern outside 0 < n < m, or a size that `m` does not divide.

    Reference: S-STE (arXiv 2409.09099), section 4.1, with gamma = 0.
    """
    _check_pattern(n, m)
    _check_groups("soft_threshold", weight, m, dim)
    return reference.soft_threshold(weight, n, m, dim, scale)


def s_ste_scale(weight: Tensor, n: int = 2, m: int = 4, dim: int = -1, rule: str = "mse") -> Tensor:
    """S-STE's beta: what S(W), the soft threshold of W, is multiplied with.

    Args:
        weight, n, m, dim: as for `soft_threshold`.
        rule: `"mse"` minimises `||W - beta * S(W)||^2`, so beta is `<W, S(W)> / ||S(W)||^2`; `"l1"` keeps the L1 norm,
            `||W||_1 / ||S(W)||_1`; `"none"` is 1.

    Returns:
        fp32 scalar on the weight's device. For Gaussian weights 1.483 (mse) and 2.512 (l1), for uniform ones 1.751
        (mse). Where S(W) is all zeros every beta is as good, and it is 1 (the paper's formula divides by zero there).

    Raises:
        ValueError: a pattern outside 0 < n < m, a size that `m` does not divide, or an unknown rule.

    Reference: S-STE (arXiv 2409.09099), section 4.2 and Table 2, where "minimise MSE" is chosen. The paper leaves open
        which L1 norm is kept; ours is that of the dense weight.
    """
    _check_pattern(n, m)
    _check_groups("s_ste_scale", weight, m, dim)
    if rule not in SCALE_RULES:
        raise ValueError(f"rule={rule!r}: must be one of {list(SCALE_RULES)}")
    return reference.s_ste_scale(weight, n, m, dim, rule)


def transposable_mask(weight: Tensor, n: int = 2, m: int = 4, solver: str = "exact") -> Tensor:
    """The mask that is n:m along rows and along columns, with as much of the L1 norm as the solver finds.

    Args:
        weight: `[R, C]`, both multiples of `m`. The m x m tiles are those of the matrix itself, so the mask of W is the
            mask of W^T (the public code of Hubara et al. cuts 64 consecutive weights of a row instead).
        n, m: the pattern, 0 < n < m.
        solver: `"exact"` is the optimum: 2:4 over all 90 patterns, any other by `"min-cost-flow"` (needs OR-tools).
            `"greedy"` keeps the largest that still fits; `"two-approx"` is the paper's 2-approximation, which prunes
            the smallest. Both are fast, any pattern, any device, and keep less.

    Returns:
        bool `[R, C]`. The optimal solvers keep exactly n in every row and column of every tile; the others at most n.
        Of equals the lower index is kept (min-cost-flow: some optimum).

    Raises:
        ValueError: not a matrix, a size that `m` does not divide, or an unknown solver.
        ImportError: min-cost-flow without OR-tools.

    Reference: Hubara et al. 2021 (arXiv 2102.08124), section 3 and Algorithm 1; Hu et al. 2024 (arXiv 2404.01847),
        Algorithm 1 for the 90 patterns. Ours scores in fp32; theirs may score in TF32. Their public dynamic code calls
        a keep-greedy sweep "2-approximation"; here each has its own name.
    """
    _check_pattern(n, m)
    if solver not in SOLVERS:
        raise ValueError(f"solver={solver!r}: must be one of {list(SOLVERS)}")
    if weight.dim() != 2 or weight.shape[0] % m or weight.shape[1] % m:
        raise ValueError(
            f"transposable_mask needs a matrix with both sizes multiples of {m}, got shape {tuple(weight.shape)}"
        )
    return transposable.transposable_mask(weight, n, m, solver)


def mvue(
    x: Tensor,
    n: int = 2,
    m: int = 4,
    dim: int = -1,
    estimator: str = "exact",
    generator: torch.Generator | None = None,
    *,
    key: Tensor | None = None,
) -> Tensor:
    """A random n:m tensor whose expectation is `x`: the minimum-variance unbiased estimate.

    Args:
        x: any shape and size; a last group that is not full is treated as if padded with zeros.
        n, m: 2:4 or 1:2.
        dim: the dimension that groups run along.
        estimator: `"exact"` has the least variance an n:m tensor can have; `"approx"` is the paper's cheaper 2:4
            formula, at most twice that (here it is the slower one, and kept for comparison).
        generator: fixes the draw, as in `torch.rand`.
        key: int64 scalar tensor that fixes the draw by itself: the same key on the same device gives the same
            result, whatever ran before. Overrides `generator`. Both None draws from torch's global generator.

    Returns:
        Same shape and dtype, at most n non-zeros in every m. All-zero groups stay zero; never -0.0.

    Raises:
        ValueError: another pattern, or an estimator the pattern does not have.

    Reference: Chmiel et al. (arXiv 2203.10991), section 4: the inclusion probabilities `pi_i = min(1, c |x_i|)`,
    `sum pi = n`, and value `x_i / pi_i`. Our deviation: the two elements of 2:4 are drawn by systematic sampling from
    one uniform number per group, where the paper tabulates cases and others ship the two-draw approximation; the
    probabilities and the variance are the optimal ones. Relative variance on Gaussian groups: 0.474 (2:4 exact), 0.502
    (approx), 0.636 (1:2).
    """
    if ((n, m), estimator) not in _ESTIMATORS:
        known = ", ".join(f"{n}:{m} {estimator}" for (n, m), estimator in _ESTIMATORS)
        raise ValueError(f"mvue has no {n}:{m} {estimator!r} estimator; it has {known}")
    if key is None:
        device = generator.device if generator is not None else x.device
        key = torch.randint(torch.iinfo(torch.int64).max, (), generator=generator, device=device)
    return _mvue(x, key, n, m, dim % x.dim(), estimator)


_ESTIMATORS = {
    ((2, 4), "exact"): reference.mvue_24,
    ((2, 4), "approx"): reference.mvue_24_approx,
    ((1, 2), "exact"): reference.mvue_12,
}


@torch.library.custom_op("sparse24::mvue", mutates_args=())
def _mvue(x: Tensor, key: Tensor, n: int, m: int, dim: int, estimator: str) -> Tensor:
    # A custom op, so that torch.compile leaves the generator inside it alone.
    size, missing = x.shape[dim], -x.shape[dim] % m
    if missing:
        x = torch.cat([x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim)
    shape = list(x.shape)
    shape[dim] //= m
    if estimator == "approx":
        shape.append(2)
    generator = torch.Generator(device=x.device).manual_seed(int(key))
    uniform = torch.rand(shape, generator=generator, device=x.device)
    # Contiguous, as the fake says, whatever the layout of x.
    return _ESTIMATORS[(n, m), estimator](x, uniform, dim).narrow(dim, 0, size).contiguous()


@_mvue.register_fake
def _(x: Tensor, key: Tensor, n: int, m: int, dim: int, estimator: str) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def masked_decay_(grad: Tensor, weight: Tensor, mask: Tensor, alpha: float) -> Tensor:
    """`grad += alpha * (1 - mask) * weight`, in place: pull pruned weights towards zero through the gradient.

    Args:
        grad, weight: same shape. mask: bool, same shape, true where the weight is kept. alpha: lambda_W >= 0.

    Reference: Hu et al. 2024 (arXiv 2404.01847), section 4.2, eq. (10).
    """
    return reference.masked_decay_(grad, weight, mask, alpha)


def pack_bits(mask: Tensor) -> Tensor:
    """bool `[..., K]` -> uint8 `[..., ceil(K/8)]`: bit j of byte i is element 8i + j (little end first)."""
    return reference.pack_bits(mask)


def unpack_bits(packed: Tensor, size: int) -> Tensor:
    """uint8 `[..., ceil(size/8)]` -> bool `[..., size]`, the inverse of `pack_bits`."""
    return reference.unpack_bits(packed, size)


def fp8_simulate(x: Tensor, format: str) -> Tensor:
    """What is left of `x` after a round trip through FP8 with one current scale per tensor.

    Simulation: the result is in the dtype of `x` again, and the products that follow run as ever. The scale is
    `s = max / amax` with amax the largest magnitude of `x` itself; values are multiplied by s, rounded to nearest even,
    and divided by s, in fp32.

    Args:
        x: any floating dtype, shape and strides; finite. Not differentiable: meant for the inside of an autograd
            function.
        format: `"e4m3"` (max 448, for forward operands) or `"e5m2"` (max 57344, for backward operands).

    Returns:
        Shape, dtype and strides of `x`. Zeros stay zeros, never -0.0, so 2:4 stays 2:4. All zeros, and empty tensors,
        come back as they are.

    Raises:
        ValueError: another `format`; NaN or inf in `x`, with their number. To see them a GPU must synchronise: a price
            of the simulation.

    Reference: S-STE (arXiv 2409.09099) and its public code, which divides by zero where ours keeps zeros.
    """
    if format not in fp8.FORMATS:
        raise ValueError(f"format={format!r}: must be one of {list(fp8.FORMATS)}")
    return fp8.fp8_simulate(x, format)


def gated_activation(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """`act(gate) * up`, the middle of a gated MLP, as one differentiable operation.

    Args:
        gate, up: same shape and floating dtype, any strides.
        kind: `"swiglu"` (SiLU), `"geglu"` (GELU, tanh approximation) or `"geglu-exact"` (GELU by erf).

    Returns:
        Shape, dtype and memory layout of `gate`: row-major in, row-major out; column-major in, column-major out. fp16
        and bf16 are computed in fp32 and rounded once. Each gradient has the layout of what it is the gradient of.

    Raises:
        ValueError: another `kind`, or shapes or dtypes that differ.

    Reference: Shazeer 2020 (arXiv 2002.05202) for the functions; Hu et al. 2024 (arXiv 2404.01847) for following the
    layout, in their code for "geglu" alone.
    """
    if kind not in gated.ACTIVATIONS:
        raise ValueError(f"kind={kind!r}: must be one of {list(gated.ACTIVATIONS)}")
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gated_activation needs gate and up alike, got {tuple(gate.shape)} {gate.dtype} and "
            f"{tuple(up.shape)} {up.dtype}"
        )
    return gated.gated_activation(gate, up, kind)


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
