"""GEMMs with one sparse operand, their plans and their operators; on a CPU stand-in for sparse tensor cores."""

import cslt
import pytest
import sparse24_kernels as kernels
import torch
from cslt import (
    sparse_plan,
    stand_in,  # noqa: F401 (a fixture)
)
from sparse24_kernels import matmul
from sparse24_kernels.gemm import GemmPlan, autotune, compress, cusparselt, linear_problem, mm_problem, plan_gemm
from sparse24_kernels.gemm.backend import DENSE, Operand
from sparse24_kernels.gemm.sparse_backends import CUSPARSELT
from torch.nn import functional as F

CPU = torch.device("cpu")
PROBLEM = linear_problem(32, 48, 32, torch.bfloat16)


def test_dense_math():
    x, weight, bias = torch.randn(2, 3, 8), kernels.nm_prune(torch.randn(5, 8)), torch.randn(5)
    assert torch.equal(kernels.sparse_linear(x, weight), F.linear(x, weight))
    assert torch.equal(kernels.sparse_linear(x, weight, bias), F.linear(x, weight, bias))
    assert torch.equal(kernels.sparse_linear(x[0, 0], weight), F.linear(x[0, 0], weight))
    column_major = weight.t().contiguous().t()
    torch.testing.assert_close(kernels.sparse_linear(x, column_major, bias), F.linear(x, weight, bias))
    torch.testing.assert_close(kernels.sparse_mm(weight, x[0].t()), weight @ x[0].t())


A, B = kernels.nm_prune(torch.randn(6, 8)), torch.randn(8, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernels.sparse_mm(A, B[:5]), r"shape \(6, 8\) does not contract with a dense one of .*: 8 and 5"),
        (lambda: kernels.sparse_mm(A, B, plan=sparse_plan()), "compressed 6 x 8 is no matrix of 6 x 8"),
        (lambda: kernels.sparse_linear(B, A), r"sparse_linear: a 2:4 operand of shape \(6, 8\) does not contract"),
        (
            lambda: kernels.sparse_linear(B.t(), A, A[:, 0].half()),
            r"bias must be torch.float32 \(6,\), got torch.float16",
        ),
        (lambda: compress(A, sparse_plan()), "compress: no compressed form: cuSPARSELt needs a CUDA device, not cpu"),
    ],
)
def test_operands_that_do_not_fit_are_told(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_plans_without_sparse_tensor_cores_are_dense():
    reason = "cuSPARSELt needs a CUDA device, not cpu"
    plan = plan_gemm(linear_problem(64, 32, 32, torch.bfloat16), CPU)
    assert plan.backend is DENSE and not plan.is_sparse
    problem = mm_problem(32, 32, 64, torch.bfloat16)
    assert plan_gemm(problem, CPU, "dense") == GemmPlan(DENSE, "requested")
    with pytest.raises(ValueError, match=f"backend='cusparselt': {reason}; use 'auto'"):
        plan_gemm(problem, CPU, "cusparselt")


def test_what_cannot_be_sparse_is_dense_and_says_why(stand_in):  # noqa: F811
    plan = plan_gemm(PROBLEM, CPU)
    assert plan[:3] == (CUSPARSELT, "measured", 3) and plan.is_sparse
    assert plan_gemm(PROBLEM, CPU) == plan
    for change, reason in (
        ({"m": 40}, "cuSPARSELt needs multiples of 16, not 40 x 32"),
        ({"k": 8}, "cuSPARSELt needs multiples of 16, not 48 x 8"),
        ({"dtype": torch.float32}, "the sparse GEMMs run in bf16 and fp16, not torch.float32"),
    ):
        problem = PROBLEM._replace(**change)
        for backend in ("auto", "cusparselt"):
            assert plan_gemm(problem, CPU, backend) == GemmPlan(DENSE, reason)
    assert plan_gemm(PROBLEM, CPU, "dense").reason == "requested"


@pytest.mark.parametrize(
    ("verdict", "auto", "requested"),
    [
        (("dense", None, None, None, "not tuned", False), None, 0),
        (("dense", None, None, None, "all failed", True), None, None),
        (("dense", 4, 9.0, 8.0, "slower", True), None, 4),
        (("cusparselt", 4, 1.0, 2.0, "faster", True), 4, 4),
    ],
)
def test_verdicts_and_requests(stand_in, monkeypatch, verdict, auto, requested):  # noqa: F811
    verdict = autotune.Verdict(*verdict)
    monkeypatch.setattr(autotune, "verdict_of", lambda problem, device: verdict)
    plan = plan_gemm(PROBLEM, CPU)
    assert plan.algorithm == auto and plan.reason == verdict.reason
    plan = plan_gemm(PROBLEM, CPU, "cusparselt")
    assert plan.algorithm == requested and plan.reason == f"requested; {verdict.reason}"
    assert plan.backend is (DENSE if requested is None else CUSPARSELT)


@pytest.mark.parametrize("problem", [linear_problem(48, 32, 64, PROBLEM.dtype), mm_problem(32, 48, 64, PROBLEM.dtype)])
def test_what_is_requested_without_a_measurement_is_checked_first(monkeypatch, tmp_path, problem):
    monkeypatch.setenv("SPARSE24_CACHE", str(tmp_path))
    for wrong_ids, backend in (((), CUSPARSELT), ((0,), DENSE)):
        cslt.install(monkeypatch, cslt.StandIn(wrong_ids))
        monkeypatch.setattr(
            autotune, "verdict_of", lambda *_: autotune.Verdict("dense", None, None, None, "untuned", False)
        )
        monkeypatch.setattr(cusparselt, "version", lambda ids=wrong_ids: ids)
        plan = plan_gemm(problem, CPU, "cusparselt")
        assert plan.backend is backend
    assert plan.reason.startswith("requested; cuSPARSELt failed its check on first use: wrong numbers in ")


def test_plans_inside_a_compiled_graph(stand_in):  # noqa: F811
    """Planned, pruned and multiplied in one graph, and the first plan of its size is made while it is traced."""

    def step(x, weight, grad):
        plan = plan_gemm(linear_problem(len(x), *weight.shape, x.dtype), x.device)
        assert plan.is_sparse
        y = kernels.sparse_linear(x, compress(kernels.nm_prune(weight), plan), plan=plan)
        plan = plan_gemm(mm_problem(grad.shape[1], x.shape[1], len(x), x.dtype), x.device)
        estimate = kernels.mvue(grad, dim=0, key=3, form="transposed")
        return y, kernels.sparse_mm(compress(estimate, plan), x, plan=plan)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    weight = torch.randn(48, 32).bfloat16()
    for tokens in (32, 16, 64):
        x, grad = torch.randn(tokens, 32).bfloat16(), torch.randn(tokens, 48).bfloat16()
        results = compiled(x, weight, grad)
        stand_in.compressed = 0
        for ours, theirs in zip(results, step(x, weight, grad)):
            assert torch.equal(ours, theirs)
        assert stand_in.compressed == 2


def test_every_backend_gives_the_same_product(stand_in):  # noqa: F811
    matrix, dense = kernels.nm_prune(torch.randn(48, 32)).bfloat16(), torch.randn(32, 16).bfloat16()
    plans = [plan_gemm(PROBLEM, CPU, backend) for backend in ("dense", "cusparselt")]
    for bias in (None, torch.randn(48).bfloat16()):
        for plan in plans:
            for stored in (matrix, kernels.pack_nm(matrix)):
                operand = compress(stored, plan)
                result = kernels.sparse_linear(dense.t(), operand, bias, plan=plan)
                torch.testing.assert_close(result, F.linear(dense.t(), matrix, bias))
                torch.testing.assert_close(kernels.sparse_mm(operand, dense, plan=plan), matrix @ dense)
    assert compress(matrix, plans[0]) == Operand(matrix)


def test_a_frozen_packed_weight_is_compressed_once(stand_in):  # noqa: F811
    x, plan = torch.randn(64, 32).bfloat16(), sparse_plan()
    own, other = (kernels.pack_nm(kernels.nm_prune(torch.randn(48, 32)).bfloat16()) for _ in range(2))

    def compressions(packed, calls=2) -> int:
        before = stand_in.compressed
        for _ in range(calls):
            ours = kernels.packed_linear(x, packed, plan=plan)
            torch.testing.assert_close(ours, F.linear(x, kernels.unpack_nm(packed)))
        return stand_in.compressed - before

    with torch.inference_mode():
        assert compressions(own) == 1 and compressions(kernels.Packed(own.values.clone(), own.mask)) == 2  # no version
    assert not any(operand.values.is_inference() for _, operand in matmul._compressed.values())
    assert (compressions(own), compressions(other), compressions(own), len(matmul._compressed)) == (0, 1, 0, 2)
    for write in (lambda: own.values.mul_(2), lambda: own.mask.copy_(other.mask)):
        write()
        assert compressions(own) == 1
    for tensor in own[:2]:
        tensor.data = tensor.clone()
        assert compressions(own) == 1
    quantized = kernels.quantize_packed(own)
    assert compressions(quantized) == 1 and quantized.scales.mul_(2) is quantized.scales
    assert compressions(quantized) == 1
    own.values.requires_grad_()  # it trains
    with torch.no_grad():
        assert compressions(own) == 2
    tensor = own = other = quantized = None
    assert not matmul._compressed


def test_operators(stand_in, monkeypatch):  # noqa: F811
    matrix = kernels.nm_prune(torch.randn(32, 48)).bfloat16()
    plan = sparse_plan(algorithm=1)
    compressed = compress(matrix, plan)
    assert compressed.values.shape == (32, 27)
    torch.library.opcheck(torch.ops.sparse24.cslt_compress.default, (matrix,))
    x, bias = torch.randn(20, 48).bfloat16(), torch.randn(32).bfloat16()
    result = kernels.sparse_linear(x.view(4, 5, 48), compressed, bias, plan=plan)
    assert torch.equal(result, F.linear(x, matrix, bias).view(4, 5, 32)) and result.is_contiguous()
    for dense in (x.t(), x.t().contiguous(), torch.randn(48, 40).bfloat16()[:, ::2]):  # any strides
        result = kernels.sparse_mm(compressed, dense, plan=plan)
        torch.testing.assert_close(result, matrix @ dense)
        arguments = (compressed.values, dense, None, False, 1)
        torch.library.opcheck(torch.ops.sparse24.cslt_mm.default, arguments)
    assert kernels.sparse_linear(x[:0], compressed, plan=plan).shape == (0, 32)
    with pytest.raises(ValueError, match="compressed 32 x 27 is no matrix of 32 x 64"):
        kernels.sparse_linear(torch.randn(20, 64).bfloat16(), compressed, plan=plan)
    with pytest.raises(ValueError, match="compress: no compressed form: cuSPARSELt needs multiples of 16, not 10 x 16"):
        compress(torch.randn(10, 16).bfloat16(), sparse_plan())
    with pytest.raises(ValueError, match=r"needs operands of one dtype, got torch.bfloat16 \(2:4\) and torch.float16"):
        kernels.sparse_linear(x.half(), compressed, plan=plan)
    monkeypatch.setattr(torch, "_cslt_compress", lambda matrix: torch.zeros(32, 30))
    with pytest.raises(RuntimeError, match=r"32 x 48 .* in 30 columns"):
        compress(matrix, plan)


def test_any_strides_come_as_the_algorithm_was_checked(stand_in, monkeypatch):  # noqa: F811
    compressed = compress(matrix := kernels.nm_prune(torch.randn(32, 48)).bfloat16(), plan := sparse_plan())
    x, seen = torch.randn(32, 96).bfloat16(), []
    for rows in (x[:, :48], x.t()[:48].t(), x[:1, :48].expand(16, 48)):
        monkeypatch.setattr(torch, "_cslt_sparse_mm", lambda a, b, **_: seen.append(b) or stand_in.matmul(a, b, **_))
        torch.testing.assert_close(kernels.sparse_linear(rows, compressed, plan=plan), F.linear(rows, matrix))
        assert seen.pop().t().is_contiguous()
        torch.testing.assert_close(kernels.sparse_mm(compressed, rows.t(), plan=plan), matrix @ rows.t())
        assert seen.pop().is_contiguous()


def test_one_token_and_operands_at_odd_addresses(stand_in):  # noqa: F811
    matrix = kernels.nm_prune(torch.randn(32, 48)).bfloat16()
    plan = sparse_plan(algorithm=1)
    compressed = compress(matrix, plan)
    for x in (torch.randn(1, 48).bfloat16(), torch.randn(48).bfloat16()):
        result = kernels.sparse_linear(x, compressed, plan=plan)
        torch.testing.assert_close(result, F.linear(x, matrix))
    storage = torch.randn(16 * 48 + 1).bfloat16()
    x, bias = storage[1:].view(16, 48), torch.randn(64).bfloat16()[::2]
    result = kernels.sparse_linear(x, compressed, bias, plan=plan)
    torch.testing.assert_close(result, F.linear(x, matrix, bias))
