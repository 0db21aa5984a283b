"""MVUE: unbiased, exactly two of four, and the least variance."""

import pytest
import sparse24_kernels as kernels
import torch

from hf_sparse24.metrics import is_nm_sparse

DRAWS = 20_000


def draw(group, draws=DRAWS, seed=0):
    x = torch.tensor(group, dtype=torch.float32).repeat(draws, 1)
    return x, kernels.mvue(x, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "group",
    [[1, 2, 3, 4], [-1, 1, -1, 1], [10, 1, 1, 1], [1e8, 1, -2, 3], [0, 0, 1, 2], [0, 0, 0, -3], [5, 4, 0, 1e-3]],
)
def test_unbiased_with_the_optimal_inclusion_probabilities(group):
    x, estimate = draw(group)
    a = torch.tensor(group, dtype=torch.float64).abs()
    others = a.sum() - a.max()
    # pi_i = min(1, c |x_i|) with sum 2, or all of the non-zeros where there are fewer than two.
    dominated = torch.where(a == a.max(), 1.0, a / others.clamp(min=1e-30))
    pi = dominated if a.max() > others else 2 * a / a.sum()
    frequency = (estimate != 0).double().mean(0)
    tolerance = 5 * (pi * (1 - pi) / DRAWS).sqrt() + 1e-6  # five standard errors
    assert ((frequency - pi).abs() <= tolerance).all(), (frequency, pi)
    kept = pi > 0
    values = torch.tensor(group, dtype=torch.float64)[kept] / pi[kept]
    for column, value in zip(estimate[:, kept].unbind(1), values):
        # One in 2^24 draws may fall on the border of two elements; all others have exactly this value.
        torch.testing.assert_close(column[column != 0].double(), value.expand((column != 0).sum()), rtol=1e-6, atol=0)
    error = (estimate.double().mean(0) - x[0].double()).abs()
    variance = torch.where(kept, a.square() * (1 / pi.clamp(min=1e-30) - 1), 0)
    assert (error <= 5 * (variance / DRAWS).sqrt() + 1e-6 * a.max()).all()


def test_all_zero_groups_stay_zero_and_every_group_has_two():
    x = torch.randn(64, 64)
    x[:8] = 0
    estimate = kernels.mvue(x)
    assert (estimate[:8] == 0).all()
    assert is_nm_sparse(estimate)
    assert ((estimate[8:].unflatten(-1, (-1, 4)) != 0).sum(-1) == 2).all()
    assert not torch.signbit(estimate[estimate == 0]).any()


def test_relative_variance_on_gaussian_groups_matches_the_papers_value():
    x = torch.randn(200_000, 4)
    relative = (kernels.mvue(x) - x).square().sum() / x.square().sum()
    assert relative.item() == pytest.approx(0.474, abs=4e-3)


@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (63, 3), (0, 4), (4, 0), (3, 5, 2)])
@pytest.mark.parametrize("dim", [0, 1, -1, -2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_shape_along_any_dimension(shape, dim, dtype):
    x = torch.randn(shape).to(dtype)
    estimate = kernels.mvue(x, dim=dim)
    assert estimate.shape == x.shape and estimate.dtype == dtype
    size = x.shape[dim]
    groups = estimate.movedim(dim, -1)
    padded = torch.nn.functional.pad(groups, (0, -size % 4))
    assert is_nm_sparse(padded)
    if size < 3:
        torch.testing.assert_close(estimate, x)  # at most two in a group: nothing to prune


def test_a_key_fixes_the_draw_whatever_ran_before():
    x, key = torch.randn(32, 32), torch.tensor(7)
    first = kernels.mvue(x, key=key)
    torch.rand(5)
    assert torch.equal(kernels.mvue(x, key=key), first)
    assert not torch.equal(kernels.mvue(x, key=torch.tensor(8)), first)
    state = torch.get_rng_state()
    kernels.mvue(x, key=key)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_key_or_generator_it_follows_torch_manual_seed():
    x = torch.randn(8, 8)
    torch.manual_seed(3)
    first = kernels.mvue(x)
    torch.manual_seed(3)
    assert torch.equal(kernels.mvue(x), first)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_gradients_stay_visible(value):
    x = torch.randn(16, 4)
    x[:, 1] = value
    assert not torch.isfinite(kernels.mvue(x)).all(dim=1).any()


def test_operator_contract():
    arguments = (torch.randn(6, 8), torch.tensor(1), 0)
    torch.library.opcheck(torch.ops.sparse24.mvue.default, arguments)
