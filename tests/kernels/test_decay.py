"""Masked decay: by hand, and rounded once."""

import pytest
import sparse24_kernels as kernels
import torch
from sparse24_kernels import gpu, reference
from sparse24_kernels.dispatch import KERNEL_DTYPES
from sparse24_kernels.hard_problems import compare


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


@pytest.mark.parametrize("of", KERNEL_DTYPES)
@pytest.mark.parametrize("to", KERNEL_DTYPES)
def test_the_kernel_of_any_dtypes_and_layouts(of, to):
    # Of 16 bits alone, torch's loops over what is no multiple of a vector round the product too, on CPUs.
    shapes = ((64, 64), (0, 8)) if of == to != torch.float32 else ((5, 16), (3, 7), (130, 40), (16,))
    for shape in shapes:
        grad, weight = torch.randn(shape).to(to), torch.randn(shape).to(of)
        for mask in (weight > 0.3, reference.masks.pack_bits(weight > 0.3)):
            for tensor in (grad, grad.mT.contiguous().mT if grad.dim() > 1 and of != to else grad):
                assert compare("masked_decay_", gpu.decay.masked_decay_, (tensor, weight, mask, -0.3)) == ""
