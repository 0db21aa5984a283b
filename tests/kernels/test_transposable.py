"""Transposable masks: every solver against brute force, the optimum and the papers' numbers."""

from itertools import product

import pytest
import sparse24_kernels as kernels
import torch
from sparse24_kernels.transposable import SOLVERS

from hf_sparse24.metrics import is_nm_sparse, kept_magnitude

NAN, INF = float("nan"), float("inf")
ROWS = [row for row in product([0, 1], repeat=4) if sum(row) == 2]
LEGAL = torch.tensor([tile for tile in product(ROWS, repeat=4) if all(sum(column) == 2 for column in zip(*tile))])


def test_the_tournament_knows_all_90_patterns():
    """A tile that has the value 1 where a legal pattern keeps it, and less elsewhere, gets that pattern."""
    assert len(LEGAL) == 90
    tiles = torch.where(LEGAL.bool(), 1.0, 0.9 * torch.rand(90, 4, 4))
    mask = kernels.transposable_mask(tiles.reshape(-1, 4))
    assert torch.equal(mask.reshape(90, 4, 4), LEGAL.bool())


def test_transposable_mask_at_ties_and_special_values():
    # All equal: the first pattern, which keeps the lower indices.
    expected = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert kernels.transposable_mask(torch.ones(4, 4)).int().tolist() == expected
    for value in (NAN, INF, -INF):
        weight = torch.randn(4, 4)
        weight[2, 1] = value
        mask = kernels.transposable_mask(weight)
        assert mask[2, 1] and is_nm_sparse(mask) and is_nm_sparse(mask, dim=0)
    for shape in [(4, 6), (6, 4), (4,), (2, 4, 4)]:
        with pytest.raises(ValueError, match="both sizes multiples of 4"):
            kernels.transposable_mask(torch.ones(shape))
    assert kernels.transposable_mask(torch.ones(0, 4)).shape == (0, 4)


def tiles_of(matrix: torch.Tensor, m: int) -> torch.Tensor:
    return matrix.unfold(0, m, m).unfold(1, m, m).reshape(-1, m, m)


def kept(weight: torch.Tensor, mask: torch.Tensor, m: int) -> torch.Tensor:
    return tiles_of(weight.abs() * mask, m).double().sum((1, 2))


@pytest.mark.parametrize("draw", ["gaussian", "ties", "zeros"])
@pytest.mark.parametrize("solver", ["exact", "min-cost-flow"])
def test_optimal_solvers_equal_brute_force(solver, draw):
    weight = torch.randn(64, 64)
    if draw == "ties":
        weight = torch.randint(-2, 3, (64, 64)).float()
    elif draw == "zeros":
        weight[torch.rand(64, 64) < 0.7] = 0
    mask = kernels.transposable_mask(weight, solver=solver)
    best = torch.einsum("tij,pij->tp", tiles_of(weight.abs(), 4).double(), LEGAL.double()).amax(1)
    torch.testing.assert_close(kept(weight, mask, 4), best, rtol=1e-6, atol=0)
    assert (tiles_of(mask, 4).sum(1) == 2).all() and (tiles_of(mask, 4).sum(2) == 2).all()


@pytest.mark.parametrize(("n", "m"), [(4, 8), (2, 8), (1, 2), (3, 5)])
def test_min_cost_flow_beats_every_other_solver(n, m):
    weight = torch.randn(4 * m, 6 * m)
    masks = {solver: kernels.transposable_mask(weight, n, m, solver) for solver in SOLVERS}
    assert torch.equal(masks["exact"], masks["min-cost-flow"])
    best = masks["min-cost-flow"]
    assert (tiles_of(best, m).sum(1) == n).all() and (tiles_of(best, m).sum(2) == n).all()
    for solver, mask in masks.items():
        assert is_nm_sparse(mask, n, m) and is_nm_sparse(mask, n, m, dim=0)
        # Of masks with n in every line, as the optimum has. (A greedy one that leaves lines short can keep more of a
        # tile now and then: its lines are under fewer constraints. Not of the whole matrix.)
        complete = tiles_of(mask, m).sum((1, 2)) == n * m
        assert (kept(weight, mask, m) <= kept(weight, best, m) + 1e-6)[complete].all()
        assert kept(weight, mask, m).sum() <= kept(weight, best, m).sum() + 1e-6
        # The mask of W^T is the transposed mask: that is what transposable means.
        transposed = kernels.transposable_mask(weight.t(), n, m, solver)
        torch.testing.assert_close(kept(weight.t(), transposed, m).sum(), kept(weight, mask, m).sum())
    pruned = {solver: (weight.abs().double() * ~mask).sum() for solver, mask in masks.items()}
    assert pruned["two-approx"] <= 2 * pruned["min-cost-flow"]


def test_greedy_and_two_approx_by_hand():
    tile = torch.tensor([[9.0, 8, 1, 1], [7, 6, 1, 1], [5, 4, 1, 1], [1, 1, 3, 2]])
    greedy = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    assert kernels.transposable_mask(tile, solver="greedy").int().tolist() == greedy
    # The ones first, from the highest index: 8 of them. Then every line but the last row has lost two.
    approx = kernels.transposable_mask(tile, solver="two-approx")
    assert is_nm_sparse(approx) and is_nm_sparse(approx, dim=0)
    assert approx.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1]]


def test_kept_magnitude_on_gaussian_tiles_matches_the_papers_values():
    weight = torch.randn(2000, 400)
    share = {solver: kept_magnitude(weight, kernels.transposable_mask(weight, solver=solver)) for solver in SOLVERS}
    assert share["exact"] == share["min-cost-flow"] == pytest.approx(0.7026, abs=1.5e-3)
    assert share["greedy"] == pytest.approx(0.6922, abs=1.5e-3)
    assert share["two-approx"] == pytest.approx(0.6303, abs=1.5e-3)
    greedy = tiles_of(kernels.transposable_mask(weight, solver="greedy"), 4).sum((1, 2)).float().mean()
    two = tiles_of(kernels.transposable_mask(weight, solver="two-approx"), 4).sum((1, 2)).float().mean()
    assert greedy.item() == pytest.approx(7.84, abs=0.02) and two.item() == pytest.approx(5.95, abs=0.02)
