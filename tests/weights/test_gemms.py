"""Sparse GEMMs in models, on a CPU stand-in for the library: right numbers, compressed once."""

import pytest
import sparse24_kernels as kernels
import torch
import zoo
from cslt import stand_in  # noqa: F401 (a fixture)
from sparse24_kernels.gemm import autotune, linear_problem
from sparse_models import keep_encodings, model_of
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.pytorch_utils import Conv1D

from hf_sparse24 import Sparse24Config, Sparse24Controller, patch_model, sparse_weights
from hf_sparse24.methods import METHODS
from hf_sparse24.metrics import is_nm_sparse
from hf_sparse24.run import sparse_run
from hf_sparse24.weights.encodings import Wanted
from hf_sparse24.weights.gemms import Gemm

SOME = ["ste", "s-ste", "t-sr-ste"]  # one, two and three sparse GEMMs
CPU = torch.device("cpu")


ESTIMATORS = ("none", "magnitude", "mvue", "mvue-approx", "mvue-1:2")


@pytest.mark.parametrize("name", ["output", "grad_input", "grad_weight"])
@pytest.mark.parametrize("sparse", [None, "weight", "input", "grad"])
def test_only_gemms_that_a_kernel_computes_have_a_problem(name, sparse):
    """A sparse weight in the first two, a gradient drawn by MVUE in the third; everything else is dense math."""
    for estimator in ESTIMATORS:
        gemm = Gemm(name, sparse, estimator=estimator)
        drawn = name == "grad_weight" and sparse == "grad" and estimator.startswith("mvue")
        runs = drawn or (name != "grad_weight" and sparse == "weight")
        assert (gemm.unsupported() is None) == runs, gemm
        assert (gemm.problem(32, 48, 32, torch.bfloat16) is not None) == runs


@pytest.mark.parametrize("pattern", ["4:8", "3:4", "2:6"])
def test_patterns_that_are_not_within_24_are_dense_math(pattern):
    reason = f"sparse tensor cores multiply 2:4, which {pattern} is not within"
    gemm = Gemm("output", "weight", pattern=kernels.Pattern.parse(pattern))
    plan = gemm.plan(32, 48, 24, torch.bfloat16, CPU, "auto")
    assert gemm.unsupported() == plan.reason == reason and not plan.is_sparse


def fix_draws(*models: nn.Module) -> None:
    for model in models:
        for weight in sparse_weights(model).values():
            weight.rng_key = torch.tensor(5)


def train(model: nn.Module, tokens: int = 32, steps: int = 3, micro_batches: int = 2) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    controller = Sparse24Controller(model, optimizer, total_steps=100)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for _ in range(micro_batches):
            x = torch.randn(2, tokens // 2, 32, generator=generator).bfloat16()
            model(x).float().square().mean().backward()
            controller.after_micro_step()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("tokens", [32, 34])
@pytest.mark.parametrize("method", SOME)
def test_training_by_sparse_gemms_equals_dense_math(stand_in, method, tokens):  # noqa: F811
    sparse, dense = train(model_of(method), tokens), train(model_of(method, "dense"), tokens)
    for ours, theirs in zip(sparse, dense):
        assert torch.equal(ours, theirs)
    by_shape = {(m, k, transposed) for m, _, k, _, transposed in stand_in.gemms}
    assert {(48, 32, True), (16, 48, True)} <= by_shape  # output
    assert ((48, 16, True) in by_shape) == (method == "t-sr-ste")  # grad_input of the second layer
    assert (32, 48, True) not in by_shape  # the first needs none
    assert any(not transposed for *_, transposed in by_shape) == (method != "ste" and tokens == 32)  # grad_weight


@pytest.mark.parametrize("pattern", ["1:2", "1:4", "1:8", "1:16", "2:8"])
@pytest.mark.parametrize("method", SOME)
def test_patterns_within_24_run_on_sparse_tensor_cores(stand_in, method, pattern):  # noqa: F811
    """With gradients by 1:2 MVUE, training by sparse GEMMs equals dense math, bit for bit."""
    settings = {"pattern": pattern, "weight_grad": "mvue-1:2"}
    settings |= {"mask_solver": "greedy"} if method == "t-sr-ste" else {}
    sparse, dense = model_of(method, **settings), model_of(method, "dense", **settings)
    for gemm in sparse_run(sparse).method.gemms:
        plan = gemm.plan(32, 48, 32, torch.bfloat16, CPU, "auto")
        assert plan.is_sparse == (gemm.name != "grad_input" or method == "t-sr-ste"), plan.reason
    for ours, theirs in zip(train(sparse), train(dense), strict=True):
        assert torch.equal(ours, theirs)
    by_shape = {(m, k, transposed) for m, _, k, _, transposed in stand_in.gemms}
    assert {(48, 32, True), (16, 48, True), (48, 32, False), (16, 32, False)} <= by_shape  # output and grad_weight
    assert ((48, 16, True) in by_shape) == (method == "t-sr-ste")  # grad_input of the second layer
    for weight in sparse_weights(sparse).values():
        assert is_nm_sparse(weight.pruned(), *weight.method.pattern)


@pytest.mark.parametrize("method", SOME)
def test_weights_are_compressed_once_per_optimizer_step(stand_in, method):  # noqa: F811
    steps, micro_batches, layers = 3, 4, 2
    forms = 3 if method == "t-sr-ste" else 2  # of both layers; the first one's input needs no gradient
    gradients = 0 if method == "ste" else steps * micro_batches * layers
    train(model_of(method), steps=steps, micro_batches=micro_batches)
    assert stand_in.compressed == steps * forms + gradients


def test_operands_of_different_dtypes_are_refused(stand_in):  # noqa: F811
    model = model_of("ste")
    for x in (torch.randn(16, 32), torch.randn(16, 32).half()):
        with pytest.raises(ValueError, match="operands of one dtype"):
            model.layers[0](x)


def test_memory_of_a_layer_whose_gemms_are_all_sparse(stand_in):  # noqa: F811
    model = model_of("t-sr-ste")
    with keep_encodings(sparse_run(model)):
        model(torch.randn(16, 32).bfloat16().requires_grad_())
        weight = sparse_weights(model)["layers.0.weight"]
        # W and its transpose, nothing dense
        assert zoo.kept_bytes(weight) == 2 * 9 / 16 * weight.parameter.numel() * 2


@pytest.mark.slow
def test_compiled_in_one_graph(stand_in):  # noqa: F811
    x = torch.randn(48, 32).bfloat16()
    for method in SOME:
        torch._dynamo.reset()
        model, eager = model_of(method), model_of(method)
        fix_draws(model, eager)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        # Another number of tokens is another plan.
        for tokens in (32, 16, 48) if method == "t-sr-ste" else (32, 16):
            for run in (compiled, eager):
                run(x[:tokens]).float().square().mean().backward()
            for ours, theirs in zip(model.parameters(), eager.parameters()):
                torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.slow
def test_other_lengths_compile_no_more_graphs_than_a_dense_model():
    for method in SOME:
        torch._dynamo.reset()
        graphs = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model_of(method).float(), fullgraph=True, backend=graphs)
        for tokens in (48, 96, 100, 130, 256):
            compiled(torch.randn(tokens, 32)).sum().backward()
        assert graphs.frame_count == 2  # of the first length, and of any


@pytest.mark.slow
def test_one_graph_for_lengths_that_share_a_measurement(monkeypatch):
    problems = [linear_problem(64, *sizes, torch.float32) for sizes in ((48, 32), (16, 48))]
    fastest = autotune.Measured(0, sparse_us=1, dense_us=9, host_us=1)
    table = {(autotune.current_environment(CPU), problem): fastest for problem in problems}
    monkeypatch.setattr(autotune, "_table", lambda: table)
    monkeypatch.setattr(autotune, "_decide", autotune._decide.__wrapped__)
    graphs = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(model_of("s-ste").float(), fullgraph=True, backend=graphs)
    for tokens in (64, 56, 60, 96, 130, 256):
        compiled(torch.randn(tokens, 32)).sum().backward()
    assert graphs.frame_count == 3  # of the first length, of others near it, and of all that were not measured


@pytest.mark.parametrize("conv1d", [False, True])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_gives_every_form(stand_in, method, conv1d):  # noqa: F811
    layer = Conv1D(48, 32) if conv1d else nn.Linear(32, 48)
    layer.bfloat16()
    with torch.no_grad():
        layer.weight.normal_()
    model = nn.ModuleList([layer])
    patch_model(model, Sparse24Config(method=method, target_modules="all-linear"))
    weight = sparse_weights(model)["0.weight"]
    for gemm in (weight.method.gemms.output, weight.method.gemms.grad_input):
        plan = gemm.plan(16, 48, 32, torch.bfloat16, CPU, "auto")
        assert plan.is_sparse == (gemm.sparse == "weight")
        if not plan.is_sparse:
            continue
        wanted = [Wanted(gemm.weight), gemm.wanted(plan)]
        dense, compressed = weight.encoded(wanted, torch.bfloat16)
        assert dense.shape == (48, 32) and is_nm_sparse(dense, dim=-1 if gemm.name == "output" else 0)
        matrix = dense if gemm.name == "output" else dense.t()
        x = torch.randn(16, matrix.shape[1]).bfloat16()
        result = kernels.sparse_linear(x, compressed, plan=plan)
        assert torch.equal(result, nn.functional.linear(x, matrix))
