"""Masked decay: by hand, in lists, and rounded once."""

import pytest
import sparse24_kernels as kernels
import torch
from sparse24_kernels.decay import foreach_masked_decay_


def test_foreach_masked_decay_equals_one_by_one():
    weights = [torch.randn(4, 8), torch.randn(3, 5)]
    masks = [kernels.nm_mask(weights[0], packed=True), torch.rand(3, 5) < 0.5]
    grads, expected = ([torch.ones_like(weight) for weight in weights] for _ in range(2))
    foreach_masked_decay_(grads, weights, masks, [0.1, 0.2])
    for grad, weight, mask, alpha in zip(expected, weights, masks, [0.1, 0.2]):
        kernels.masked_decay_(grad, weight, mask, alpha)
    torch.testing.assert_close(grads, expected)
    with pytest.raises(ValueError, match=r"as many gradients as weights, masks and alphas, got \[2, 2, 2, 1\]"):
        foreach_masked_decay_(grads, weights, masks, [0.1])
    with pytest.raises(ValueError, match=r"gradient and weight of one shape, got \(4, 8\) and \(3, 5\)"):
        kernels.masked_decay_(grads[0], weights[1], masks[1], 0.1)


def test_masked_decay_rounds_once():
    grad, weight = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1 + 2**-7 + 2**-12])
    kernels.masked_decay_(grad, weight, torch.tensor([False]), 1.0)
    assert grad.item() == torch.tensor(1.0 + weight.item()).bfloat16().item() == 2.015625  # rounded twice: 2.0


def test_masked_decay():
    grad, weight = torch.tensor([1.0, 1.0]), torch.tensor([10.0, -20.0])
    returned = kernels.masked_decay_(grad, weight, torch.tensor([True, False]), 0.1)
    assert grad.tolist() == [1.0, -1.0] and returned is grad
