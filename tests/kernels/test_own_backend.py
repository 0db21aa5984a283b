"""A backend and an operator of a user's own: one file, one registration each, and everything else works with them."""

import own_backend
import pytest
import sparse24_kernels as kernels
import torch
from backends import unregister_backend
from sparse24_kernels import dispatch
from sparse24_kernels.gemm import (
    GemmPlan,
    compress,
    linear_problem,
    plan_gemm,
    plan_packed,
    register_backend,
)
from sparse24_kernels.gemm import packed as packed_gemm
from sparse24_kernels.gemm.backend import Operand, backend_names, encode_one
from sparse24_kernels.operators import Operators
from torch.nn.functional import linear

CPU, BF16 = torch.device("cpu"), torch.bfloat16
PROBLEM = linear_problem(16, 48, 32, BF16)
unregister_backend("fp32")  # importing own_backend registered it for all tests of the process


@pytest.fixture
def fp32(monkeypatch):
    """The backend of tests/support/own_backend.py, for this test alone; counts its GEMMs in `ran`."""
    register_backend(backend := own_backend.Fp32Backend())
    run, backend.ran = own_backend.Fp32Backend.linear, 0

    def count(self, *arguments):
        self.ran += 1
        return run(self, *arguments)

    monkeypatch.setattr(own_backend.Fp32Backend, "linear", count)
    yield backend
    unregister_backend("fp32")


def test_a_backend_is_chosen_by_name(fp32):
    plan = plan_gemm(PROBLEM, CPU, "fp32")
    assert plan == GemmPlan(fp32, "requested; sums in fp32") and plan.is_sparse
    weight, x, bias = kernels.nm_prune(torch.randn(48, 32)).to(BF16), torch.randn(16, 32).to(BF16), torch.randn(48)
    expected = (linear(x.float(), weight.float()) + bias.to(BF16).float()).to(BF16)
    packed = kernels.pack_nm(weight)
    for operand in (encode_one(fp32, weight, "dense"), compress(weight, plan), compress(packed, plan)):
        assert torch.equal(kernels.sparse_linear(x, operand, bias.to(BF16), plan=plan), expected)
    assert torch.equal(kernels.packed_linear(x, packed, bias.to(BF16), plan=plan), expected)
    assert fp32.ran == 4 and backend_names()[-1] == "fp32"


@pytest.mark.parametrize("name", ["auto", "dense", "", None, 3])
def test_names_that_mean_something_else_are_refused(name, fp32):
    fp32.name = name
    with pytest.raises(ValueError, match=r"register_backend: backend.name=.* must be a name other than"):
        register_backend(fp32)


def test_a_backend_that_stores_several_tensors_is_told_where_they_do_not_fit(fp32, monkeypatch):
    monkeypatch.setattr(type(fp32), "encode", lambda self, matrix: Operand(*kernels.pack_nm(matrix)[:2]))
    plan, weight = plan_gemm(PROBLEM, CPU, "fp32"), torch.randn(48, 32)
    assert compress(weight, plan).mask is not None
    with pytest.raises(ValueError, match="backend='fp32' stores several tensors"):
        encode_one(fp32, weight, "dense")


def test_an_implementation_may_have_one_operator(dense_math, monkeypatch):
    """A native `packed_linear` for CPUs, say: one table and one registration, and everything else stays."""

    ran, right = [], kernels.reference.packed.packed_linear

    def load():
        return Operators(packed_linear=lambda x, *rest: ran.append(len(x)) or right(x, *rest))

    def unsupported(device, dtype):
        return None if device.type == "cpu" else f"native kernels run on CPUs, not {device.type}"

    native = dispatch.Implementation("native", load, unsupported, str)
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", [*dispatch.IMPLEMENTATIONS, native])
    dispatch.choose.cache_clear()
    try:
        assert dispatch.choose_kernels(CPU, operator="packed_linear") == ("native", "cpu")
        assert dispatch.choose_kernels(CPU).implementation == "reference"
        packed, x = kernels.pack_nm(torch.randn(8, 16)), torch.randn(3, 16)
        plan = plan_packed(linear_problem(3, 8, 16, x.dtype), CPU)
        assert plan.backend is packed_gemm.PACKED
        ran.clear()
        assert kernels.packed_linear(x, packed).shape == (3, 8) and kernels.unpack_nm(packed).shape == (8, 16)
        assert ran == [3]
        meta = dispatch.choose_kernels(torch.device("meta"), operator="packed_linear")
        assert meta.reason.endswith("; native kernels run on CPUs, not meta")
    finally:
        dispatch.choose.cache_clear()
