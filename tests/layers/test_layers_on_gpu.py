"""Sparse layers on a GPU: outputs and gradients as exact as those of dense math, eager, captured and compiled."""

from itertools import product

import pytest
import torch
from cslt import StandIn, stand_in  # noqa: F401 (a fixture)
from gpu_layers import METHODS, linear, patched
from sparse24_kernels.gemm.measure import capture
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from recipes.benchmarks.cases import BF16, draw
from recipes.benchmarks.gemms import NAMES, assert_three_way

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KINDS = ("Linear", "Linear without bias", "Conv1D")
SHAPES = ((256, 128, 256), (1280, 320, 48), (1000, 1280, 5120), (2055, 2048, 512), (4096, 5120, 1280))
"""(tokens, in, out): also tokens that are no multiple of 16, which the library does not take."""


def layer_cases(shapes, modes):
    """Each kind, method, shape and dtype alone; and one of each method in other modes."""
    cases = list(product(KINDS, METHODS, shapes, (BF16, torch.float16), ("eager",)))
    return [*cases, *product(KINDS[:1], METHODS, shapes[:1], (BF16,), modes)]


def check_layer(device, compiler, kind, method, shape, dtype, mode):
    """The output and the gradients of a layer by sparse GEMMs, against dense math on the same zeros, and in fp32."""
    tokens, inputs, out = shape
    torch._dynamo.reset()  # it counts how often one piece of code was compiled, and stops at eight

    def build(dtype: torch.dtype) -> nn.Module:
        layer = linear(inputs, out, kind != "Linear without bias", device).to(dtype)
        if kind != "Conv1D":
            return layer
        conv = Conv1D(out, inputs).to(device, dtype)
        conv.load_state_dict({"weight": layer.weight.t(), "bias": layer.bias})
        return conv

    def results(backend: str, dtype: torch.dtype, mode: str = "eager") -> list[Tensor]:
        layer = patched(build(dtype), method, backend)
        x, grad = (draw(device, (tokens, n), BF16, seed=n).to(dtype) for n in (inputs, out))
        x.requires_grad_()
        forward = torch.compile(layer, fullgraph=True, backend=compiler) if mode == "fullgraph" else layer

        def call() -> list[Tensor]:
            output = forward(x)
            return [output, *torch.autograd.grad(output, [x, *layer.parameters()], grad)]

        if mode != "CUDA graph":
            return [result.detach() for result in call()]
        replay, found = capture(call)
        found = [result.detach().zero_() for result in found]
        replay()
        torch.cuda.synchronize()
        return found

    three = results("cusparselt", dtype, mode), results("dense", dtype), results("dense", torch.float32)
    for ours, dense, truth, name in zip(*three, (*NAMES, "grad_bias")):
        assert_three_way(ours, dense, truth, name)


@pytest.mark.gpu
@pytest.mark.parametrize("case", layer_cases(SHAPES, ("fullgraph", "CUDA graph")), ids=str)
def test_a_sparse_layer_is_as_exact_as_a_dense_one(case):
    check_layer(CUDA, "inductor", *case)


@pytest.mark.slow
def test_the_check_passes_what_is_right_and_catches_what_is_not(stand_in, monkeypatch):  # noqa: F811
    cases = layer_cases(((32, 32, 48), (34, 32, 16)), ("fullgraph",))
    assert len(cases) == 2 * 2 * 2 * 3 + 2
    for case in cases:
        check_layer(CPU, "aot_eager", *case)
    assert stand_in.gemms
    monkeypatch.setattr(torch, "_cslt_sparse_mm", StandIn(wrong_ids=(3,)).matmul)
    for case in cases:
        with pytest.raises(AssertionError, match="is allowed"):
            check_layer(CPU, "aot_eager", *case)
