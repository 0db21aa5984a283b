"""The gate of the sparse products: right on this device, by dense math on the same zeros, or no speed is reported.

The truth is fp32 math on the rounded operands. A sparse product may be no further from it than twice what the dense
product in the operands' dtype is (`assert_three_way`). Checked are the public functions, whole layers forward and
backward, CUDA graphs, and torch.compile; with the algorithms that would run. What was tuned later is checked by the
tuner and again before it is timed.
"""

import time
from collections.abc import Callable
from functools import partial

import sparse24_kernels as kernels
import torch
from cases import assert_same_bits
from report import clean
from shapes import METHODS
from side_by_side import assert_three_way, forget, randn
from timing import OutOfTime, describe, time_limit
from torch import Tensor, nn

Check = tuple[str, Callable[[], None]]

SHAPES = ((256, 128, 256), (1280, 320, 48), (1000, 1280, 5120), (2055, 2048, 512), (4096, 5120, 1280))
"""(tokens, in, out): also tokens that are no multiple of 16, which the library does not take."""

SECONDS = 60.0
"""For one check: compiling takes the longest."""


def checks(device: torch.device, shapes=SHAPES, compiler: str = "inductor") -> list[Check]:
    """All of them, the cheap ones first; no two have one name."""
    found: list[Check] = []
    for dtype in (torch.bfloat16, torch.float16):
        for shape in shapes:
            name = f"{shape[0]} tokens, {shape[1]} to {shape[2]}, {str(dtype)[6:]}"
            found.append((f"products: {name}", partial(check_products, device, shape, dtype)))
            for method in METHODS:
                for kind in ("Linear", "Conv1D"):
                    for bias in (True, False) if kind == "Linear" else (True,):
                        suffix = "" if bias else ", no bias"
                        check = partial(check_layer, device, shape, dtype, method, kind, bias)
                        found.append((f"{kind} {method}: {name}{suffix}", check))
    for method in METHODS:
        check = partial(check_layer, device, shapes[0], torch.bfloat16, method, "Linear", True)
        if device.type == "cuda":
            found.append((f"CUDA graph: {method}", partial(check, around=in_a_graph)))
            graphs = partial(torch.compile, fullgraph=True, mode="reduce-overhead")
            found.append((f"torch.compile(mode='reduce-overhead'): {method}", partial(check, graphs, thrice)))
        compiled = partial(torch.compile, fullgraph=True, backend=compiler)
        found.append((f"torch.compile(fullgraph=True): {method}", partial(check, compiled=compiled)))
    return found


def gate(run) -> bool:
    """Run them; False ends the run.

    All that is timed is bf16: what is wrong in fp16 alone is an error of the run, and keeps no bf16 speed back.
    """
    start, failed, passed = time.monotonic(), {}, 0
    for name, check in run.product_checks():
        try:
            with time_limit(min(SECONDS, run.left(reserve=5))):
                check()
            passed += 1
        except (Exception, OutOfTime) as error:  # recorded, and the next one runs
            failed[name] = clean(describe(error))
        forget(run, name)
    fp16 = {name: failed.pop(name) for name in list(failed) if ", float16" in name}
    if fp16:
        why_fp16 = f"{len(fp16)} checks failed: " + "; ".join(f"{name}: {why}" for name, why in fp16.items())[:3000]
        run.result["errors"]["gate of fp16 products"] = why_fp16
        print("fp16:", why_fp16, flush=True)
    seconds = round(time.monotonic() - start, 1)
    run.result["product_gate"] = {"passed": passed, "failed": failed, "seconds": seconds}
    print(f"gate of the products: {passed} passed, {len(failed)} failed", flush=True)
    for name, error in failed.items():
        print(f"  {name}: {error}", flush=True)
    return bool(passed) and not failed


def check_products(device: torch.device, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """The three products through the public functions, with a bias in the first."""
    tokens, inputs, out = shape
    x, grad = randn(device, tokens, inputs, dtype=dtype, seed=1), randn(device, tokens, out, dtype=dtype, seed=2)
    weight, bias = weights(device, out, inputs, dtype)
    # Without zeros, which small numbers become in fp16, every group has two non-zeros and one way to be written.
    weight = torch.where(weight.abs() < 1e-4, 1e-4, weight)
    forms, mask = ["dense", "compressed", "compressed-transposed"], kernels.transposable_mask(weight, packed=True)
    algorithms = [
        plan(kernels.plan_linear, tokens, *sizes, dtype, device) for sizes in ((out, inputs), (inputs, out))
    ]  # before anything is compressed: they find out the layout
    sparse, compressed, transposed = kernels.prune_forms(weight, forms, "mask", mask=mask)
    for ours, matrix in ((compressed, sparse), (transposed, sparse.t())):
        if ours.shape[1] * 16 == matrix.shape[1] * 9:  # padding is never written, and differs
            theirs = kernels.compress(matrix)
            assert_same_bits(ours.view(torch.int16), theirs.view(torch.int16), f"compressed {tuple(matrix.shape)}")

    ours = kernels.sparse_linear(x, compressed, bias, algorithm=algorithms[0])
    dense = nn.functional.linear(x, sparse, bias)
    assert_three_way(ours, dense, x.float() @ sparse.float().t() + bias.float(), "output")

    ours = kernels.sparse_linear(grad, transposed, algorithm=algorithms[1])
    assert_three_way(ours, grad @ sparse, grad.float() @ sparse.float(), "grad_input")

    if tokens % 16:
        return
    grad[:64] = 0  # groups that can be written in several ways
    algorithm = plan(kernels.plan_mm, out, inputs, tokens, dtype, device)
    pruned, compressed = (kernels.mvue(grad, dim=0, key=7, form=form) for form in ("transposed", "compressed"))
    for ours in (compressed, kernels.compress(pruned)):
        result = kernels.sparse_mm(ours, x, algorithm=algorithm)
        assert_three_way(result, pruned @ x, pruned.float() @ x.float(), "grad_weight")


def check_layer(
    device: torch.device,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    method: str,
    kind: str,
    bias: bool,
    compiled: Callable[[nn.Module], Callable] = lambda layer: layer,
    around: Callable[[Callable[[], list[Tensor]]], list[Tensor]] = lambda call: call(),
) -> None:
    """A patched layer, forward and backward: its output and three gradients."""
    tokens, inputs, out = shape
    layer = sparse_layer(device, shape, dtype, method, kind, bias)
    x = randn(device, tokens, inputs, dtype=dtype, seed=1).requires_grad_()
    grad = randn(device, tokens, out, dtype=dtype, seed=2)
    torch._dynamo.reset()  # it counts how often one piece of code was compiled, and stops at eight
    forward = compiled(layer)

    def call() -> list[Tensor]:
        output = forward(x)
        return [output, *torch.autograd.grad(output, [x, *layer.parameters()], grad)]

    results = dict(zip(("output", "grad_input", *(name for name, _ in layer.named_parameters())), around(call)))
    weight = layer.sparse_weight()
    weight = weight.t() if kind == "Conv1D" else weight
    pruned = kernels.mvue(grad, dim=0, key=layer.rng_key)
    for name, of in results.items():
        dense, truth = (
            reference(name, convert, layer, x.detach(), weight, grad, pruned) for convert in (_as_is, _fp32)
        )
        if name == "weight" and kind == "Conv1D":
            dense, truth = dense.t(), truth.t()
        assert_three_way(of.detach(), dense, truth, name)


def reference(name: str, convert, layer, x: Tensor, weight: Tensor, grad: Tensor, pruned: Tensor) -> Tensor:
    """One result of a layer by dense math, with operands in the precision that `convert` gives them."""
    if name == "output":
        return nn.functional.linear(convert(x), convert(weight), None if layer.bias is None else convert(layer.bias))
    if name == "grad_input":
        return convert(grad) @ convert(weight)
    return convert(pruned).t() @ convert(x) if name == "weight" else convert(grad).sum(0)


def _as_is(x: Tensor) -> Tensor:
    return x.detach()


def _fp32(x: Tensor) -> Tensor:
    return x.detach().float()


def sparse_layer(device, shape: tuple[int, int, int], dtype, method: str, kind: str, bias: bool) -> nn.Module:
    """A layer whose products are sparse even where dense math is faster."""
    from hf_sparse24 import Sparse24Config, patch_model
    from hf_sparse24.linear import Conv1D

    _, inputs, out = shape
    layer = Conv1D(out, inputs) if kind == "Conv1D" else nn.Linear(inputs, out, bias)
    layer = layer.to(device, dtype)
    weight, values = weights(device, out, inputs, dtype)
    with torch.no_grad():
        layer.weight.copy_(weight.t() if kind == "Conv1D" else weight)
        if layer.bias is not None:
            layer.bias.copy_(values)
    patch_model(
        nn.ModuleList([layer]), Sparse24Config(method=method, target_modules="all-linear", backend="cusparselt")
    )
    layer.rng_key = torch.tensor(7, device=device)
    return layer


def weights(device: torch.device, out: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A weight and a bias of the usual sizes."""
    weight = randn(device, out, inputs, dtype=dtype, seed=3) / inputs**0.5
    return weight, randn(device, out, dtype=dtype, seed=4)


def plan(make: Callable, *problem):
    algorithm = make(*problem, "cusparselt")
    assert algorithm is not None, "no sparse product takes this shape"
    return algorithm


def thrice(call: Callable[[], list[Tensor]]) -> list[Tensor]:
    """The third results: torch.compile warms up, captures, and then replays."""
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        results = call()
    return results


def in_a_graph(call: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What the second replay leaves behind, in memory that was made useless before it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for _ in range(2):
        for result in results:
            result.detach().fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    return results
