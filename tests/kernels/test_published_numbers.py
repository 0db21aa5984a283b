"""Numbers that the papers, and the code of their authors, give for the kernels. More are in the tests of each kernel.

The sources: S-STE (arXiv 2409.09099; code huyz2023/2by4-pretrain, sparse/utils.py), Chmiel et al. (arXiv 2203.10991).
Where a paper has a formula and no number, the number was computed from the formula, by hand or in fp64.
"""

import math
from itertools import product

import pytest
import sparse24_kernels as kernels
import torch
from sparse24_kernels import Pattern
from sparse24_kernels.fp8 import _fp8_quantize

EVERY_TIE = torch.tensor(list(product([0.0, 1.0, -1.0, 2.0, -2.0, 3.0], repeat=4)))


def test_soft_threshold_is_the_formula_of_the_paper_and_of_its_code_at_every_tie():
    """S-STE, section 4.1: sign(a) max(|a| - t, 0), t the second smallest. The code has t as minima and maxima."""
    a = EVERY_TIE.abs()
    second = a.sort(dim=1).values[:, 1:2]
    pairs = a.unflatten(1, (2, 2))
    code = torch.minimum(pairs.amin(2).amax(1), pairs.amax(2).amin(1))
    assert torch.equal(second[:, 0], code)
    expected = EVERY_TIE.sign() * (a - second).clamp(min=0)
    assert torch.equal(kernels.soft_threshold(EVERY_TIE), expected)
    assert torch.equal(kernels.soft_threshold(EVERY_TIE.t(), dim=0, scale=torch.tensor(1.5)).t(), 1.5 * expected)


def test_s_of_gaussian_weights_keeps_this_share_of_a_hard_mask():
    """The scale that would keep the L1 norm of hard 2:4 pruning is 1.871, that of the dense weight 2.512."""
    weight = torch.randn(4000, 400)
    soft, hard = (prune(weight).abs().sum() for prune in (kernels.soft_threshold, kernels.nm_prune))
    assert (hard / soft).item() == pytest.approx(1.871, abs=6e-3)


# Group, and for each estimator the inclusion probabilities. A kept element has its value over its probability.
EXACT = {  # Chmiel et al., section 4: min(1, c |a|) with sum 2
    (1.0, 2.0, 3.0, 4.0): (0.2, 0.4, 0.6, 0.8),
    (10.0, 1.0, 1.0, 1.0): (1.0, 1 / 3, 1 / 3, 1 / 3),
    (5.0, -2.0, 1.0, 0.0): (1.0, 2 / 3, 1 / 3, 0.0),
}
APPROX = {  # their approximation: p_i = t_i + |a_i| (K - k_i), t_i = |a_i| / S, k_i = t_i / (S - |a_i|), K = sum k
    (1.0, 2.0, 3.0, 4.0): (0.2345238, 0.4412698, 0.6083333, 0.7158730),
    (10.0, 1.0, 1.0, 1.0): (0.9615385, 0.3461538, 0.3461538, 0.3461538),
    (5.0, -2.0, 1.0, 0.0): (0.9226190, 0.7023810, 0.3750000, 0.0),
}
HALF = {(3.0, -5.0, 2.0, 2.0): (3 / 8, 5 / 8, 1 / 2, 1 / 2)}  # 1:2: |a_i| / (|a_1| + |a_2|)
VARIANCE = {  # of the four elements together, sum of a^2 (1 / p - 1)
    ("2:4", "exact"): {(1.0, 2.0, 3.0, 4.0): 20.0, (10.0, 1.0, 1.0, 1.0): 6.0, (5.0, -2.0, 1.0, 0.0): 4.0},
    ("2:4", "approx"): {(1.0, 2.0, 3.0, 4.0): 20.4736, (10.0, 1.0, 1.0, 1.0): 9.6667, (5.0, -2.0, 1.0, 0.0): 5.4584},
    ("1:2", "exact"): {(3.0, -5.0, 2.0, 2.0): 2 * 3 * 5 + 2 * 2 * 2},  # 2 |a_1| |a_2| for each two
}


@pytest.mark.parametrize(
    ("pattern", "estimator", "probabilities"),
    [("2:4", "exact", EXACT), ("2:4", "approx", APPROX), ("1:2", "exact", HALF)],
)
def test_mvue_on_literal_groups(pattern, estimator, probabilities):
    draws, variances = 40_000, VARIANCE[pattern, estimator]
    for group, chances in probabilities.items():
        x = torch.tensor([group]).repeat(draws, 1)
        estimate = kernels.mvue(x, *Pattern.parse(pattern), estimator=estimator, key=5)
        for value, chance, column in zip(group, chances, estimate.unbind(1)):
            kept = column[column != 0]
            error = 5 * math.sqrt(chance * (1 - chance) / draws)  # five standard errors
            assert len(kept) / draws == pytest.approx(chance, abs=error + 1e-6)
            torch.testing.assert_close(kept, torch.full_like(kept, value / max(chance, 1e-9)), rtol=1e-6, atol=0)
        assert (estimate - x).square().sum(1).mean().item() == pytest.approx(variances[group], rel=0.03)


def test_fp8_by_the_scale_of_the_authors_code():
    """s = max / amax: 448 / 3.5 = 128 and 57344 / 3.5 = 16384, and a product is divided by both scales."""
    x = torch.tensor([3.5, -1.75, 0.875])
    for format, scale in (("e4m3", 128.0), ("e5m2", 16384.0)):
        quantized, s = _fp8_quantize(x, format)
        assert s.item() == scale and (quantized.float() / s).tolist() == x.tolist()
