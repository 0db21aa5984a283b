"""Masked decay: by hand, and rounded once."""

import pytest
import sparse24_kernels as kernels
import torch


def test_operands_that_do_not_fit_are_told():
    with pytest.raises(ValueError, match=r"gradient and weight of one shape, got \(4, 8\) and \(3, 5\)"):
        kernels.masked_decay_(torch.ones(4, 8), torch.ones(3, 5), torch.ones(3, 5, dtype=torch.bool), 0.1)


def test_masked_decay_rounds_once():
    grad, weight = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1 + 2**-7 + 2**-12])
    kernels.masked_decay_(grad, weight, torch.tensor([False]), 1.0)
    assert grad.item() == torch.tensor(1.0 + weight.item()).bfloat16().item() == 2.015625  # rounded twice: 2.0


def test_masked_decay():
    grad, weight = torch.tensor([1.0, 1.0]), torch.tensor([10.0, -20.0])
    returned = kernels.masked_decay_(grad, weight, torch.tensor([True, False]), 0.1)
    assert grad.tolist() == [1.0, -1.0] and returned is grad
