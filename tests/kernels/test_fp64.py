"""fp64 inputs are computed in fp64: each input has a difference that fp32 would round away."""

import pytest
import sparse24_kernels as kernels
import torch
from sparse24_kernels.transposable import SOLVERS

TINY = 1e-10
NEAR = torch.tensor([1 + TINY, 1, 1 + 3 * TINY, 1 + 2 * TINY], dtype=torch.float64)


def test_masks():
    assert kernels.nm_mask(NEAR).tolist() == [False, False, True, True]
    kept = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 0, 0]])
    for solver in SOLVERS:
        mask = kernels.transposable_mask(1 + TINY * kept.double(), solver=solver)
        assert torch.equal(mask, kept.bool()), solver


def test_pruning():
    expected = [0, 0, 2 * TINY, TINY]
    for actual in (kernels.soft_threshold(NEAR), kernels.soft_threshold(NEAR[:, None], dim=0)[:, 0]):
        assert actual.dtype == torch.float64 and actual.tolist() == pytest.approx(expected, rel=1e-5)
    assert kernels.soft_threshold(NEAR.float()).tolist() == [0, 0, 0, 0]
    assert kernels.nm_prune(NEAR).tolist() == [0, 0, *NEAR[2:].tolist()]
    for rule, scale in (("mse", 3 / (5 * TINY)), ("l1", 4 / (3 * TINY))):
        beta = kernels.s_ste_scale(NEAR, rule=rule)
        assert beta.dtype == torch.float32 and beta.item() == pytest.approx(scale, rel=1e-5)
    packed = kernels.pack_nm(NEAR.repeat(2).view(1, 8))
    assert torch.equal(kernels.unpack_nm(packed)[0, :4], kernels.nm_prune(NEAR))


@pytest.mark.parametrize(
    ("n", "m", "estimator", "value"),
    # 2:4: half of the sum; 1:2: the sum; the approximation: S / (1 + K - k) of equal elements, S / 2
    [(2, 4, "exact", 2 + 3 * TINY), (1, 2, "exact", 2 + TINY), (2, 4, "approx", 2 + 3 * TINY)],
)
def test_mvue(n, m, estimator, value):
    estimate = kernels.mvue(NEAR.repeat(100, 1), n, m, estimator=estimator, key=1)[:, :m]
    assert estimate.dtype == torch.float64
    assert estimate[estimate != 0].tolist() == pytest.approx([value] * int((estimate != 0).sum()), rel=0.4 * TINY)


def test_decay_activations_and_gemms():
    grad = torch.ones(4, dtype=torch.float64)
    kernels.masked_decay_(grad, NEAR, torch.zeros(4).bool(), 1.0)
    assert torch.equal(grad, 1 + NEAR)
    gate = torch.zeros(4, dtype=torch.float64)
    grads = torch.autograd.functional.jacobian(lambda x: kernels.gated_activation(x, NEAR, "swiglu"), gate)
    assert torch.equal(grads.diagonal(), NEAR / 2)
    x, weight = NEAR.view(1, 4), kernels.nm_prune(NEAR).view(1, 4)
    expected = (NEAR[2:] ** 2).sum()
    for result in (kernels.sparse_linear(x, weight), kernels.sparse_mm(weight, x.t())):
        assert result.item() == pytest.approx(expected.item(), rel=1e-15)
