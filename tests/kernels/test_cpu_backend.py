"""The sparse GEMMs of CPUs: what dense math computes, by half the multiplications, where a measurement chose them."""

import pytest
import sparse24_kernels as kernels
import torch
from sparse24_kernels.cpu.library import load, loaded
from sparse24_kernels.formats import split_operand
from sparse24_kernels.gemm import autotune, compress, cpu_kernels, linear_problem, mm_problem, plan_gemm
from sparse24_kernels.gemm.sparse_backends import CPU
from sparse24_kernels.prune import prune_forms
from torch._dynamo.testing import CompileCounter

from hf_sparse24 import Sparse24Config, patch_model

HERE = torch.device("cpu")
pytestmark = pytest.mark.skipif(isinstance(load(), str), reason="no kernels for this CPU")


@pytest.fixture(autouse=True)
def own_table(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSE24_CACHE", str(tmp_path))
    for cached in (autotune._decide, autotune._table):
        cached.cache_clear()
    yield
    for cached in (autotune._decide, autotune._table):
        cached.cache_clear()


def plan(problem):
    found = plan_gemm(problem, HERE, "cpu")
    assert found.backend is CPU and found.is_sparse
    return found


@pytest.mark.parametrize(("tokens", "out", "inputs"), [(1, 8, 32), (70, 33, 96), (129, 200, 1056), (600, 64, 64)])
def test_linear(tokens, out, inputs):
    weight, bias = kernels.nm_prune(torch.randn(out, inputs)), torch.randn(out)
    x = torch.randn(2, tokens, inputs)
    found = plan(linear_problem(2 * tokens, out, inputs, torch.float32))
    for matrix in (weight, weight.t().contiguous().t()):  # row-major, and the transpose of what is
        result = kernels.sparse_linear(x, compress(matrix, found), bias, plan=found)
        torch.testing.assert_close(result, torch.nn.functional.linear(x, weight, bias), rtol=1e-5, atol=1e-4)


def test_no_tokens():
    model = torch.nn.ModuleList([torch.nn.Linear(64, 32)])
    patch_model(model, Sparse24Config(target_modules="all-linear", backend="cpu"))
    output = model[0](torch.randn(0, 64, requires_grad=True))
    output.sum().backward()
    assert output.shape == (0, 32) and not model[0].weight.grad.any()


@pytest.mark.parametrize(("m", "n", "k"), [(8, 5, 32), (33, 70, 96), (200, 300, 1056)])
def test_product(m, n, k):
    sparse, dense = kernels.nm_prune(torch.randn(m, k)), torch.randn(k, n)
    found = plan(mm_problem(m, n, k, torch.float32))
    result = kernels.sparse_mm(compress(sparse, found), dense, plan=found)
    torch.testing.assert_close(result, sparse @ dense, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rule", ["magnitude", "soft-threshold", "mask", "mvue"])
def test_pruning_writes_the_operand(rule):
    x, key = torch.randn(96, 160), torch.tensor(3)
    for dim, form in ((0, "packed-transposed"), (1, "packed")):
        if rule == "mvue":
            packed, dense = (kernels.mvue(x, dim=dim, key=key, form=each) for each in (form, "dense"))
        else:
            mask = kernels.nm_mask(x, dim=dim, packed=True) if rule == "mask" else None
            packed, dense = prune_forms(x, [form, "dense"], rule, dim=dim, mask=mask)
        assert torch.equal(packed, cpu_kernels.compress(dense if dim else dense.t()))
        assert torch.equal(kernels.unpack_nm(kernels.Packed(*split_operand(packed))), dense if dim else dense.t())


def test_what_it_refuses_is_dense_with_its_reason():
    for problem, reason in (
        (linear_problem(64, 32, 48, torch.float32), "contracts multiples of 32 only"),
        (linear_problem(64, 32, 32, torch.bfloat16), "run in fp32, not torch.bfloat16"),
    ):
        found = plan_gemm(problem, HERE, "cpu")
        assert not found.is_sparse and reason in found.reason


@pytest.mark.parametrize("path", ["avx512_bf16", "avx512", "avx2"])
@pytest.mark.parametrize(("name", "least"), [("AMD EPYC 9654", 512), ("Intel(R) Xeon(R)", None), ("", None)])
def test_what_is_known_of_a_kind_of_cpu(path, name, least, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "device_name", lambda device: name)
    monkeypatch.setattr(loaded(), "path", path)
    assert cpu_kernels.faster_from() == least


def test_auto_without_a_measurement(faster_from_32, monkeypatch):
    for problem in (linear_problem(32, 96, 64, torch.float32), mm_problem(64, 32, 96, torch.float32)):
        found = plan_gemm(problem, HERE)
        assert found.backend is CPU and found.reason == "from 32 tokens and features on, faster on such CPUs"
        for smaller in ({"m": 31}, {"n": 16}):
            found = plan_gemm(problem._replace(**smaller), HERE)
            assert not found.is_sparse and "below 32 tokens or features" in found.reason
        for refused, reason in (({"k": 72}, "multiples of 32"), ({"dtype": torch.bfloat16}, "not torch.bfloat16")):
            assert reason in plan_gemm(problem._replace(**refused), HERE).reason
    monkeypatch.setattr(cpu_kernels, "times", lambda problem: (10.0, 9.0))
    autotune.tune([problem], HERE)
    assert not plan_gemm(problem, HERE).is_sparse  # what was measured here decides


def test_compiled_lengths_share_the_graphs_of_a_verdict(faster_from_32):
    torch.compiler.reset()
    model = torch.nn.ModuleList([torch.nn.Linear(64, 96)])
    patch_model(model, Sparse24Config(method="s-ste", target_modules="all-linear"))
    compiled = torch.compile(model[0], backend=(counter := CompileCounter()))
    for tokens in (64, 96, 128, 160, 320, 16, 10, 2):
        x = torch.randn(tokens, 64)
        assert torch.equal(compiled(x), model[0](x))
    assert counter.frame_count == 3  # of the first length, of longer ones, and of those that are dense


def test_auto_takes_what_was_measured_to_be_faster(monkeypatch):
    problem = linear_problem(512, 64, 96, torch.float32)
    monkeypatch.setattr(cpu_kernels, "faster_from", lambda: None)
    assert plan_gemm(problem, HERE).reason == autotune.NOT_TUNED
    monkeypatch.setattr(cpu_kernels, "times", lambda problem: (10.0, 15.0))
    assert autotune.tune([problem], HERE)[problem].backend == "cpu"
    found = plan_gemm(problem, HERE)
    assert found.backend is CPU and "1.50 times as fast" in found.reason
    monkeypatch.setattr(cpu_kernels, "times", lambda problem: (10.0, 9.0))
    autotune.tune([problem], HERE)
    found = plan_gemm(problem, HERE)
    assert not found.is_sparse and "0.90 times as fast" in found.reason


def test_times_are_those_of_both_kinds():
    for problem in (linear_problem(32, 64, 96, torch.float32), mm_problem(64, 32, 96, torch.float32)):
        assert all(us > 0 for us in cpu_kernels.times(problem))


def test_a_measurement_holds_for_its_number_of_threads(monkeypatch):
    before = autotune.current_environment(HERE)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert before != autotune.current_environment(HERE) == autotune.current_environment(HERE)
