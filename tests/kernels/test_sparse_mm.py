"""sparse_mm and the choice of its backend."""

import pytest
import sparse24_kernels as kernels
import torch


def test_products():
    a, b, bias = torch.randn(2, 3, 8), torch.randn(8, 5), torch.randn(5)
    for sparse in ("left", "right"):
        torch.testing.assert_close(kernels.sparse_mm(a, b, sparse=sparse), a @ b)
        torch.testing.assert_close(kernels.sparse_mm(a, b, bias, sparse=sparse), a @ b + bias)


def test_wrong_arguments():
    a, b = torch.ones(4, 4), torch.ones(4, 4)
    with pytest.raises(ValueError, match="sparse must be 'left' or 'right', got 'both'"):
        kernels.sparse_mm(a, b, sparse="both")
    with pytest.raises(ValueError, match="backend='cublas' is not available"):
        kernels.sparse_mm(a, b, sparse="left", backend="cublas")


def test_every_choice_has_a_reason():
    for requested in ("auto", *kernels.BACKENDS):
        choice = kernels.choose_backend(requested, torch.device("cpu"))
        assert choice.backend == "reference" and choice.reason
