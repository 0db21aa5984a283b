"""The products with one sparse operand, as dense math; on sparse tensor cores see tests/test_products.py."""

import pytest
import sparse24_kernels as kernels
import torch
from torch.nn import functional as F


def test_dense_math():
    x, weight, bias = torch.randn(2, 3, 8), kernels.nm_prune(torch.randn(5, 8)), torch.randn(5)
    assert torch.equal(kernels.sparse_linear(x, weight), F.linear(x, weight))
    assert torch.equal(kernels.sparse_linear(x, weight, bias), F.linear(x, weight, bias))
    column_major = weight.t().contiguous().t()
    torch.testing.assert_close(kernels.sparse_linear(x, column_major, bias), F.linear(x, weight, bias))
    torch.testing.assert_close(kernels.sparse_mm(weight, x[0].t()), weight @ x[0].t())


def test_every_choice_has_a_reason():
    for requested in ("auto", "reference"):
        choice = kernels.choose_backend(requested, torch.device("cpu"))
        assert choice.backend == "reference" and choice.reason
    for wrong in ("cublas", "Reference"):
        with pytest.raises(ValueError, match=f"backend='{wrong}' is not available; choose 'auto' or one of"):
            kernels.choose_backend(wrong, torch.device("cpu"))


def test_plans_without_sparse_tensor_cores_are_dense():
    device = torch.device("cpu")
    assert kernels.plan_linear(64, 32, 32, torch.bfloat16, device) is None
    assert kernels.plan_mm(32, 32, 64, torch.bfloat16, device, "reference") is None
    assert kernels.why_not_sparse(32, 32, torch.bfloat16, device) == "cuSPARSELt needs a CUDA device, not cpu"
    assert kernels.why_not_sparse(32, 32, torch.bfloat16, device, "reference") == "backend='reference'"
