"""MVUE: unbiased, exactly two of four, and the least variance."""

import pytest
import sparse24_kernels as kernels
import torch
from sparse24_kernels.reference import philox

from hf_sparse24.metrics import is_nm_sparse

ESTIMATORS = [(2, 4, "exact"), (2, 4, "approx"), (1, 2, "exact")]


def test_all_zero_groups_stay_zero_and_every_group_has_two():
    x = torch.randn(64, 64)
    x[:8] = 0
    estimate = kernels.mvue(x)
    assert (estimate[:8] == 0).all()
    assert is_nm_sparse(estimate)
    assert ((estimate[8:].unflatten(-1, (-1, 4)) != 0).sum(-1) == 2).all()
    assert not torch.signbit(estimate[estimate == 0]).any()


@pytest.mark.parametrize("shape", [(5, 7), (63, 3), (0, 4), (3, 5, 2)])
@pytest.mark.parametrize("dim", [0, 1, -1])
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


def test_philox_known_answers():
    """Those that its authors published for 7 rounds (Random123, kat_vectors)."""
    zeros, ones = (torch.full((1,), value) for value in (0, 0xFFFFFFFF))
    for word, key, expected in (
        (zeros, zeros[0], "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (ones, ones[0], "5207ddc2 45165e59 4d8ee751 8c52f662"),
    ):
        words = philox.philox(*(word.clone() for _ in range(4)), key, key)
        assert " ".join(f"{int(w):08x}" for w in words) == expected


def test_numbers_belong_to_groups_and_vectors():
    """The estimate of the transposed matrix is the transposed estimate, and a larger one draws the same numbers."""
    x, key = torch.randn(10, 12), torch.tensor(11)
    for n, m, estimator in ESTIMATORS:
        estimate = kernels.mvue(x, n, m, 0, estimator, key=key)
        assert torch.equal(kernels.mvue(x.t(), n, m, 1, estimator, key=key), estimate.t())
        more = torch.cat([torch.cat([x[:8], torch.randn(8, 7)], 1), torch.randn(9, 19)])
        assert torch.equal(kernels.mvue(more, n, m, 0, estimator, key=key)[:8, :12], estimate[:8])


def test_forms():
    x, key = torch.randn(16, 24).bfloat16(), torch.tensor(3)
    for dim in (0, 1):
        dense = kernels.mvue(x, dim=dim, key=key)
        transposed = kernels.mvue(x, dim=dim, key=key, form="transposed")
        assert torch.equal(transposed, dense.t()) and transposed.is_contiguous()
    for x, n, m, form, message in (
        (torch.ones(8), 2, 4, "transposed", "needs a matrix"),
        (torch.ones(8, 8), 2, 4, "sparse", "must be one of .'dense', 'transposed'"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.mvue(x, n, m, form=form)


def test_without_key_it_follows_torch_manual_seed():
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


def test_independent_between_keys_and_groups():
    """Whether an element is kept says nothing about another group, or about the same group under another key."""
    x = torch.ones(1, 8)
    picks = torch.stack([kernels.mvue(x, key=torch.tensor(key))[0] != 0 for key in range(4000)]).double()
    correlation = torch.corrcoef(picks.t())
    across_groups = correlation[:4, 4:].abs().max()
    across_keys = torch.corrcoef(torch.stack([picks[:-1, 0], picks[1:, 0]]))[0, 1].abs()
    assert across_groups < 5 / 4000**0.5 and across_keys < 5 / 4000**0.5
