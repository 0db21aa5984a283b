"""Pruning one linear layer from the Gram matrix of its inputs: masks, SparseGPT, the best weights for a mask.

The error of a layer's output, summed over all calibration tokens, is a quadratic form in the change of weights:

    ||X W^T - X V^T||_F^2 = tr(D G D^T),    D = W - V,    G = X^T X

so `G` `[in, in]` is all that needs to be kept of the activations. A bias is one more input that is always 1: `X` gets a
column of ones, `W` and `V` the bias as their last column. Weights are `[out, in]` and all tensors fp32 or all fp64.
"""

import sparse24_kernels as kernels
import torch
from sparse24_kernels import Pattern
from torch import Tensor


def best_mask(scores: Tensor, n: int, m: int, dim: int, solver: str | None) -> Tensor:
    """Return the mask of the `n` of every `m` largest `scores` along `dim`. With a solver, that of masks along both
    dimensions with the largest sum of squared scores: a dropped weight adds that square to the squared error."""
    if solver is None:
        return kernels.nm_mask(scores, n, m, dim)
    return kernels.transposable_mask(scores.square(), n, m, solver)


def ridge(gram: Tensor, damping: float) -> float:
    """Return the addend to the diagonal: `damping` times its mean, or `damping` if all inputs are zero."""
    return damping * (gram.diagonal().mean().item() or 1.0)


MAX_ITERATIONS, SWEEPS = 300, 2  # of `least_squares` and of `round_to_int8`
WIDTH = 128  # columns that `sparsegpt` and `round_to_int8` finish before they touch those further right, for speed


def sparsegpt(
    weight: Tensor, gram: Tensor, n: int, m: int, damping: float, width: int = WIDTH, solver: str | None = None
) -> tuple[Tensor, Tensor, float]:
    """Prune columns left to right, each followed by the OBS update of the columns to its right.

    With `H = gram + ridge` and `F` the columns from j on, pruning weight j of a row costs `w_j^2 / [H_F^-1]_jj` and
    moves the others by `-w_j [H_F^-1]_j: / [H_F^-1]_jj`. All those inverses lie in one triangular factor,
    `H^-1 = U^T U`: `[H_F^-1]_jj = U_jj^2` and `[H_F^-1]_j: = U_jj U_j:`. The mask of a group of `m` is chosen by that
    cost when its first column is reached; with a `solver` (see `best_mask`) that of the tiles of `m` rows, which those
    columns hold whole. Weights of an input that is never active become zero, whatever the mask.

    `damping` (see `ridge`) is raised tenfold, from 1e-6 at least, until the factorization succeeds. Returns the pruned
    weight, its mask, and the damping that was used.

    Reference: Frantar & Alistarh 2023 (arXiv 2301.00774), Algorithm 1; for inputs that are never active, their code
    (github.com/IST-DASLab/sparsegpt, `fasterprune`). Our deviations: U comes from one Cholesky factorization and one
    triangular inverse, not two inverses. Inputs that are never active count as 0, not 1, in the damping's mean.
    """
    factor, damping = _inverse_factor(gram, damping)
    scale = factor.diagonal()[:, None]
    weight = weight.masked_fill(gram.diagonal() == 0, 0).t().contiguous()  # [in, out]: a column of the weight is a row
    mask = torch.empty_like(weight, dtype=torch.bool)
    columns = len(weight)
    width = max(width // m, 1) * m
    for start in range(0, columns, width):
        end = min(start + width, columns)
        errors = torch.empty_like(weight[start:end])
        for left in range(start, end, m):
            right = left + m
            mask[left:right] = best_mask(weight[left:right] / scale[left:right], n, m, 0, solver)
            for j in range(left, right):
                errors[j - start] = weight[j].masked_fill(mask[j], 0) / scale[j]
                weight[j:right] -= factor[j, j:right, None] * errors[j - start]
            weight[right:end] -= factor[left:right, right:end].t() @ errors[left - start : right - start]
        weight[end:] -= factor[start:end, end:].t() @ errors
    return kernels.apply_mask(weight, mask).t(), mask.t(), damping


def _inverse_factor(gram: Tensor, damping: float) -> tuple[Tensor, float]:
    """Return U, upper triangular, with `U^T U` the inverse of the damped Gram matrix, and the damping it took."""
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    regular = gram + (gram.diagonal() == 0).diag()  # an input that is never active is no reason to damp the others more
    while True:
        # Flipped, factored and flipped back, H = R R^T with R upper triangular, so that U = R^-1 is as well.
        lower, failed = torch.linalg.cholesky_ex((regular + ridge(gram, damping) * identity).flip(0, 1))
        if not failed:
            return torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True), damping
        damping = max(10 * damping, 1e-6)


def least_squares(
    weight: Tensor, mask: Tensor, gram: Tensor, penalty: Tensor, start: Tensor, tolerance: float = 0.02
) -> Tensor:
    """Return the weights on `mask` whose output is closest to that of the dense `weight`: `[out, in]`, zero elsewhere.

    Minimises `tr((V - W) (G + diag(penalty)) (V - W)^T)` over `V = mask * V` by conjugate gradients with the diagonal
    as preconditioner. Every step lowers the objective, so stopping early is safe: after two steps in a row that each
    lower it by at most the share `tolerance` of the rest. `penalty` `[in]`, >= 0, pulls each column towards its dense
    value; with 0 a singular `gram` is allowed, and a column of zeros stays as it is in `start`, the first iterate.

    Reference: AdaPrune, Hubara et al. 2021 (arXiv 2102.08124), section 4. Our deviations: the Gram matrix replaces the
    paper's 1000 steps of Adam on stored activations; weights and bias are one problem; the inputs are those of the
    pruned blocks.
    """
    damped = gram + penalty.diag()
    limits = torch.finfo(gram.dtype)
    inverse = 1 / damped.diagonal().clamp(min=limits.tiny)  # where it is that large, the residual is 0
    free = mask.to(weight)
    result = start.clone()
    residual = (weight - start) @ damped
    objective = torch.sum((weight - start) * residual)
    residual *= free
    direction = residual * inverse
    size = torch.linalg.vecdot(residual, direction)[:, None]
    goal, gained = limits.eps * size, True
    for _ in range(MAX_ITERATIONS):
        image = (direction @ damped).mul_(free)
        curvature = torch.linalg.vecdot(direction, image)[:, None]
        active = (size > goal) & (curvature > 0)  # rows that have converged wait for the others
        step = (size / curvature).where(active, 0)
        result.addcmul_(step, direction)
        gain = (step * size).sum()
        objective -= gain
        gained, before = bool(gain > tolerance * objective.clamp(min=0)), gained
        if not gained and not before:
            break
        residual.addcmul_(step, image, value=-1)
        scaled = residual * inverse
        previous, size = size, torch.linalg.vecdot(residual, scaled)[:, None]
        direction.mul_((size / previous).where(active, 0)).add_(scaled)
    return result


def round_to_int8(weight: Tensor, gram: Tensor, pattern: Pattern, damping: float, dtype: torch.dtype) -> Tensor:
    """Return a pruned weight as int8 values times scales, those with a small output error: `[out, in]`.

    Starts from `quantize_packed` of the weight in `dtype`, keeps its scales, and goes over the columns: each takes the
    step that is best for the rounded others, so that no change raises the error. The largest magnitude of each 128
    stays: from it `quantize_packed` finds the same scales and values again. As QuantEase (arXiv 2309.01885).
    """
    gram = gram + ridge(gram, damping) * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    packed = kernels.quantize_packed(kernels.pack_nm(weight.to(dtype), *pattern))
    assert packed.scales is not None
    steps = packed.scales.to(weight).repeat_interleave(128, 1)[:, : weight.shape[1]]
    result = kernels.unpack_nm(packed).to(weight)
    free = (weight != 0) & (result.abs() < 126.5 * steps) & (gram.diagonal() > 0)
    for _ in range(SWEEPS):
        for left in range(0, weight.shape[1], WIDTH):
            right = min(left + WIDTH, weight.shape[1])
            gradient = (result - weight) @ gram[:, left:right]
            for j in range(left, right):
                before = result[:, j].clone()
                best = (before - gradient[:, j - left] / gram[j, j]) / steps[:, j]
                after = (best.round().clamp(-127, 127) * steps[:, j]).to(dtype).to(weight)
                result[:, j] = torch.where(free[:, j], after, before)
                gradient += (result[:, j] - before)[:, None] * gram[j, left:right]
    return result
