"""The algorithms of oneshot on one layer, against literal solutions and the numbers of the official code."""

from types import SimpleNamespace

import pytest
import sparse24_kernels as kernels
import torch
from oneshot_models import correlated
from sparse24_kernels import Pattern, nm_mask

from hf_sparse24.metrics import is_nm_sparse
from hf_sparse24.pruning import layerwise
from hf_sparse24.pruning.layerwise import least_squares, ridge, round_to_int8, sparsegpt
from hf_sparse24.pruning.prune_layer import CRITERIA


def output_norm(weight: torch.Tensor, gram: torch.Tensor) -> float:
    """`||X weight^T||_F`, from the Gram matrix of X."""
    return ((weight @ gram) * weight).sum().clamp(min=0).sqrt().item()


def randn64(*shape) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


OFFICIAL_WEIGHT = torch.tensor([[4.0, -3, 2, 1, -2, 5, 1, -4], [1, 2, -4, 3, 3, 3, -2, 1], [-2, 5, 1, -3, 4, -1, 2, 2]])

OFFICIAL_X = torch.tensor(
    [
        [1.0, 2, 0, -1, 3, 0, 1, 2], [0, 1, 1, 2, -1, 1, 0, 1], [2, -1, 3, 0, 1, 1, -2, 0], [1, 0, -2, 1, 0, 2, 1, -1],
        [-1, 1, 1, 3, 2, 0, 1, 1], [0, 2, 1, -1, 1, -3, 2, 0], [3, 1, 0, 1, -2, 1, 1, 2], [1, -2, 1, 0, 1, 1, 0, 3],
        [2, 1, -1, 1, 0, -1, 2, -2], [0, 3, 2, 1, 1, 2, -1, 1],
    ]
)  # fmt: skip


@pytest.mark.parametrize(
    ("dead", "damping", "expected"),
    [
        ([], 0.01, [
            [4.000000, -3.000000, 0, 0, 0, 5.400703, 0, -3.730569],
            [0, 0, -1.695099, 2.009198, 2.785538, 4.951161, 0, 0],
            [0, 5.573154, 0, -2.047218, 4.395056, 0, 0, 1.351910],
        ]),
        ([4], 0.0, [
            [4.000000, -3.000000, 0, 0, 0, 4.988992, 0, -3.036478],
            [0, 0, -1.612774, 1.893511, 0, 5.155490, 1.834702, 0],
            [0, 5.756978, 0, -2.040148, 0, -2.903130, 0, 2.362982],
        ]),
    ],
)  # fmt: skip
def test_sparsegpt_gives_the_numbers_of_the_official_code(dead, damping, expected):
    """What `SparseGPT.fasterprune` in github.com/IST-DASLab/sparsegpt (147d215) gives, dead inputs included."""
    x = OFFICIAL_X.index_fill(1, torch.tensor(dead, dtype=torch.long), 0)
    pruned, mask, used = sparsegpt(OFFICIAL_WEIGHT, x.T @ x, 2, 4, damping)
    torch.testing.assert_close(pruned, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    assert used == damping and mask.unflatten(1, (-1, 4)).sum(2).eq(2).all() and (pruned[~mask] == 0).all()


@pytest.mark.parametrize(
    ("dead", "expected"),
    [
        ([], [[4.0, -3, 0, 0, 0, 5, 0, -4], [0, 0, -4, 3, 3, 3, 0, 0], [0, 5, 0, -3, 4, 0, 0, 2]]),
        ([4], [[4.0, -3, 0, 0, 0, 5, 0, -4], [0, 0, -4, 3, 0, 3, -2, 0], [0, 5, 0, -3, 0, 0, 2, 2]]),
    ],
)
def test_wanda_gives_the_numbers_of_the_official_code(dead, expected):
    """What `prune_wanda` in github.com/locuslab/wanda (8e8fc87) gives, dead inputs included."""
    x = OFFICIAL_X.index_fill(1, torch.tensor(dead, dtype=torch.long), 0)
    inputs = SimpleNamespace(squares=x.square().sum(0))
    pruned, mask, _ = CRITERIA["wanda"](OFFICIAL_WEIGHT, inputs, Pattern(2, 4), 0.01, None)
    assert torch.equal(pruned, torch.tensor(expected)) and torch.equal(OFFICIAL_WEIGHT * mask, pruned)


@pytest.mark.parametrize(("n", "m"), [(2, 4), (4, 8), (1, 4)])
def test_sparsegpt_is_optimal_brain_surgery(n, m):
    """Against the formulas taken literally: an inverse for every column, of the columns that are left."""
    x, weight = correlated(100, 16), randn64(3, 16)
    gram = x.T @ x
    damped = gram + ridge(gram, 0.01) * torch.eye(16)
    rows, keep = weight.clone(), torch.ones(3, 16, dtype=torch.bool)
    for row, kept in zip(rows, keep):
        for j in range(16):
            if j % m == 0:
                costs = [row[k] ** 2 / damped[k:, k:].inverse()[0, 0] for k in range(j, j + m)]
                kept[[j + k for k in torch.tensor(costs).argsort()[: m - n].tolist()]] = False
            if not kept[j]:
                inverse = damped[j:, j:].inverse()
                row[j:] -= row[j].clone() / inverse[0, 0] * inverse[0]
                row[j] = 0
    for width in (1, m, 128):  # the blocks of lazy updates change nothing
        pruned, mask, damping = sparsegpt(weight, gram, n, m, 0.01, width)
        assert torch.equal(mask, keep) and damping == 0.01
        torch.testing.assert_close(pruned, rows)
    assert is_nm_sparse(pruned, n, m) and not torch.signbit(pruned[pruned == 0]).any()


def test_sparsegpt_raises_the_damping_where_it_must():
    weight = randn64(4, 8)
    singular = torch.ones(8, 8, dtype=torch.float64)
    pruned, mask, damping = sparsegpt(weight, singular, 2, 4, 0.0)
    assert damping == 1e-6 and pruned.isfinite().all() and is_nm_sparse(mask)
    pruned, mask, damping = sparsegpt(weight, 0 * singular, 2, 4, 0.0)  # no input at all is no reason to
    assert damping == 0.0 and not pruned.any() and mask.sum() == weight.numel() // 2


@pytest.mark.parametrize("penalty", [0.0, 0.3])
def test_least_squares_is_the_closed_form(penalty):
    x, weight = correlated(80, 16), randn64(5, 16)
    mask = nm_mask(weight)
    start = weight * mask
    ridge = torch.full((16,), penalty, dtype=torch.float64)
    solution = least_squares(weight, mask, x.T @ x, ridge, start, tolerance=0)
    assert torch.equal(start, weight * mask)
    # A ridge is 16 more rows of data, that ask for the dense weights.
    design = torch.cat([x, penalty**0.5 * torch.eye(16, dtype=torch.float64)])
    for row, kept, found in zip(weight, mask, solution):
        expected = torch.linalg.lstsq(design[:, kept], design @ row).solution
        torch.testing.assert_close(found[kept], expected, rtol=1e-6, atol=1e-8)
        assert (found[~kept] == 0).all()


def test_least_squares_with_too_little_data():
    """Fewer tokens than kept weights, and inputs that are never active: the outputs become exact, nothing explodes."""
    x, weight = randn64(6, 32), randn64(4, 32)
    x[:, :3] = 0
    mask = nm_mask(weight)
    solution = least_squares(weight, mask, x.T @ x, torch.zeros(32, dtype=torch.float64), weight * mask)
    torch.testing.assert_close(x @ solution.T, x @ weight.T)
    assert torch.equal(solution[:, :3], (weight * mask)[:, :3]) and solution.abs().max() < 100


def test_rounding_to_int8_on_a_row_where_the_best_steps_are_known():
    """Every combination of the two nearest steps of each free weight, but the largest one."""
    weight = torch.tensor([[1.27, 0, 0, 0.1037, 0, 0.0349, 0, 0.0248]], dtype=torch.float64)  # steps of 0.01
    x = correlated(40, 8, seed=3) + 2 * correlated(40, 1, seed=4)  # rounding errors of one sign add up
    gram = x.T @ x
    rounded = round_to_int8(weight, gram, Pattern(2, 4), 0.0, torch.float64)
    down = (weight * 100).floor()
    choices = [down + torch.tensor([[0, 0, 0, a, 0, b, 0, c]]) for a in (0, 1) for b in (0, 1) for c in (0, 1)]
    errors = [output_norm(choice.clamp(max=127) / 100 - weight, gram) for choice in choices]
    assert output_norm(rounded - weight, gram) <= min(errors) + 1e-12
    nearest = (weight * 100).round() / 100
    assert output_norm(rounded - weight, gram) < output_norm(nearest - weight, gram)


@pytest.mark.parametrize(("dtype", "n", "m"), [(torch.float32, 2, 4), (torch.bfloat16, 16, 32), (torch.float16, 6, 8)])
def test_rounding_to_int8_lowers_the_error_and_is_found_again(dtype, n, m, monkeypatch):
    """Several groups of 128, some zeros and dead inputs; the packed form of the result is exactly the result."""
    x = correlated(700, 288).float()
    x[:, 40:44] = 0
    weight = kernels.nm_prune(torch.randn(24, 288), n, m)
    weight[0], weight[1, :128] = 0, 0
    gram = x.T @ x
    nearest = kernels.unpack_nm(kernels.quantize_packed(kernels.pack_nm(weight.to(dtype), n, m)))
    errors = [output_norm(nearest.float() - weight, gram)]
    for sweeps in (1, 2, 4):
        monkeypatch.setattr(layerwise, "SWEEPS", sweeps)
        rounded = round_to_int8(weight, gram, Pattern(n, m), 0.0, dtype)
        errors.append(output_norm(rounded - weight, gram))
        stored = kernels.quantize_packed(kernels.pack_nm(rounded.to(dtype), n, m))
        assert torch.equal(kernels.unpack_nm(stored).float(), rounded)
        assert torch.equal(stored.scales, kernels.quantize_packed(kernels.pack_nm(weight.to(dtype), n, m)).scales)
        assert torch.equal(rounded[:, 40:44], nearest[:, 40:44].float()) and not rounded[weight == 0].any()
        with monkeypatch.context() as patch:
            patch.setattr(layerwise, "WIDTH", 37)
            other = round_to_int8(weight, gram, Pattern(n, m), 0.0, dtype)
        assert (other != rounded).float().mean() < 0.01
    assert errors == sorted(errors, reverse=True) and errors[1] < 0.6 * errors[0], errors
