"""Linear layers and MLP blocks, dense against sparse; and what the gate of the layers checks.

Ours beside dense, beside torchao's SemiSparseLinear (up to 0.18), and beside PyTorch's to_sparse_semi_structured, which
has no backward.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import sparse24_kernels as kernels
import torch
from benchmarks.gate import Check, replayed
from benchmarks.gemms import AUTO, CHECKED, MODELS, NAMES, Layer, assert_three_way, layers, sets_that_fill
from benchmarks.run import Row, Run, Section
from benchmarks.timing import Call
from kernel_cases import BF16, draw
from sparse24_kernels import GemmProblem
from torch import Tensor, nn

METHODS = {"s-ste": 1.28, "t-sr-ste": 1.45}
"""Goals for layers: times dense from 8192 tokens on, with operands made in every call."""

Build = Callable[[], nn.Module]


def patched(build: Build, method: str, backend: str, operands: str = "made") -> nn.Module:
    """A new module with sparse layers, and MVUE's random numbers fixed.

    Weight operands are "made" in every call; "kept" after the first one, as for later micro-batches of a step, but also
    while a CUDA graph is captured, when hf_sparse24 keeps nothing; or there are none: the weights are "packed".
    """
    from hf_sparse24 import Sparse24Config, pack_model, patch_model, sparse_weights

    parent = nn.ModuleList([build()])
    patch_model(parent, Sparse24Config(method=method, target_modules="all-linear", backend=backend))
    for weight in sparse_weights(parent).values():
        weight.rng_key = torch.tensor(7, device=weight.parameter.device)
        if operands == "kept":
            vars(weight)["encoded"] = made_once(weight.encoded)
    if operands == "packed":
        pack_model(parent)
    return parent[0]


def made_once(encode: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """`SparseWeight.encoded` that makes each operand once."""
    one = cache(lambda operand, dtype: encode([operand], dtype, 1)[0])
    return lambda wanted, dtype, tokens: [one(operand, dtype) for operand in wanted]


class Layers(Section):
    name, groups, share, base = "layers", ("layers", "models"), 10, "dense"
    note = (
        "Forward and backward; in brackets: times dense. Kept: operands of an earlier micro-batch of the step; made, "
        "auto: pruned and compressed in every call."
    )

    def entries(self) -> list[Layer]:
        return layers()

    def problems(self, entry: Layer) -> list[GemmProblem]:
        return list(entry.problems().values())

    def ways(self, entry: Layer, device: torch.device) -> dict[str, Build]:
        """Each makes a module, which is trained or, where `entry.training` is false, run forward. One is dense."""
        build = partial(linear, entry.inputs, entry.out, entry.bias, device)
        ways: dict[str, Build] = {"dense": build}
        for method in METHODS:
            ways[f"{method}, kept"] = partial(patched, build, method, "cusparselt", "kept")
            ways[f"{method}, made"] = partial(patched, build, method, "cusparselt")
            ways[f"{method}, auto"] = partial(patched, build, method, "auto")
        return ways

    def goals(self, entry: Layer) -> dict[str, float]:
        made = {f"{method}, made": wanted for method, wanted in METHODS.items() if entry.tokens >= 8192}
        return made | {f"{method}, auto": AUTO for method in METHODS} | {"auto": AUTO}

    def measure(self, run: Run, entry: Layer) -> Row:
        device, sets = run.machine.device, range(sets_that_fill(run, entry))
        inputs = [draw(device, (entry.tokens, entry.inputs), BF16, seed=2 * i) for i in sets]

        def make(build: Build) -> list[Call]:
            module = build()
            with torch.no_grad():
                shape = module(inputs[0]).shape
            if not entry.training:
                return [partial(torch.no_grad()(module), x) for x in inputs]
            grads = [draw(device, shape, BF16, seed=2 * i + 1) for i in sets]
            return [partial(train, module, x.detach().requires_grad_(), grad) for x, grad in zip(inputs, grads)]

        makers = {way: partial(make, build) for way, build in self.ways(entry, device).items()}
        return run.compare(makers, withheld=withheld(run, makers))


def withheld(run: Run, ways: Iterable[str]) -> dict[str, str]:
    """Our ways whose method has failed in the gate of the layers, with the reason. Where a way names no method, its
    weights are those of S-STE."""
    ours = [way for way in ways if not way.startswith(("dense", "torch"))]
    methods = {way: way.split(",")[0] if way.split(",")[0] in METHODS else "s-ste" for way in ours}
    reasons = {way: run.unverified("gate of the layers", f"'{method}'") for way, method in methods.items()}
    return {way: reason for way, reason in reasons.items() if reason}


def train(module: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(module(x), [x, *module.parameters()], grad)


def linear(inputs: int, out: int, bias: bool, device: torch.device) -> nn.Linear:
    """The same weights each time."""
    layer = nn.Linear(inputs, out, bias, device, BF16)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(draw(device, tuple(parameter.shape), BF16) / inputs**0.5)
    return layer


class Mlp(nn.Module):
    """SwiGLU, with our fused activation or with PyTorch's two operations; or GELU."""

    def __init__(self, entry: Layer, device: torch.device, fused: bool = False):
        super().__init__()
        hidden, inner, bias, self.fused = entry.inputs, entry.out, entry.bias, fused
        self.gate_proj = None if bias else linear(hidden, inner, bias, device)
        self.up_proj, self.down_proj = linear(hidden, inner, bias, device), linear(inner, hidden, bias, device)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        if self.gate_proj is None:
            return self.down_proj(nn.functional.gelu(up, approximate="tanh"))
        gate = self.gate_proj(x)
        gated = kernels.gated_activation(gate, up, "swiglu") if self.fused else nn.functional.silu(gate) * up
        return self.down_proj(gated)


class Mlps(Layers):
    name, groups, share = "MLP blocks", ("mlps", "models"), 7
    note = "As above; forward and backward makes operands in every call. Packed: weights in packed form alone."

    def entries(self) -> list[Layer]:
        kinds = product((8192, 32768, 2048), MODELS, (True, False))
        return [Layer(f"{model} MLP", *MODELS[model][::-1], tokens, training=x) for tokens, model, x in kinds]

    def problems(self, entry: Layer) -> list[GemmProblem]:
        both = (entry, replace(entry, out=entry.inputs, inputs=entry.out))
        return [problem for layer in both for problem in layer.problems().values()]

    def ways(self, entry: Layer, device: torch.device) -> dict[str, Build]:
        build, fused = partial(Mlp, entry, device), partial(Mlp, entry, device, fused=True)
        ways: dict[str, Build] = {"dense": build}
        if not entry.bias:
            ways["dense, fused activation"] = fused
        if not entry.training:  # every method multiplies by the same kind of weight
            ways["packed"] = partial(patched, fused, "s-ste", "auto", "packed")
            ways["s-ste, auto"] = partial(patched, fused, "s-ste", "auto")
            return ways | {"torch to_sparse_semi_structured": lambda: by_torch(build())}
        for method in METHODS:
            ways[method] = partial(patched, fused, method, "cusparselt")
            ways[f"{method}, auto"] = partial(patched, fused, method, "auto")
        return ways | {"torchao SemiSparseLinear": lambda: by_torchao(build())}


def by_torchao(module: nn.Module) -> nn.Module:
    from torchao.sparsity.training import SemiSparseLinear, swap_linear_with_semi_sparse_linear

    linears = {name: SemiSparseLinear for name, child in module.named_modules() if isinstance(child, nn.Linear)}
    swap_linear_with_semi_sparse_linear(module, linears)
    return module


def by_torch(module: nn.Module) -> nn.Module:
    for child in module.modules():
        if isinstance(child, nn.Linear):
            sparse = torch.sparse.to_sparse_semi_structured(kernels.nm_prune(child.weight.detach()))
            child.weight = nn.Parameter(sparse, requires_grad=False)
    return module


def checks(device: torch.device, shapes: Any = CHECKED, compiler: str = "inductor") -> list[Check]:
    """For the gate of the layers: each alone, and one of each method in a CUDA graph and under torch.compile."""
    kinds = ("Linear", "Linear without bias", "Conv1D")
    rows = list(product(kinds, METHODS, shapes, (BF16, torch.float16), ("eager",)))
    modes = ("fullgraph", "CUDA graph") if device.type == "cuda" else ("fullgraph",)
    rows += product(kinds[:1], METHODS, shapes[:1], (BF16,), modes)
    return [(str(row).replace("torch.", ""), partial(check_layer, device, compiler, *row)) for row in rows]


def check_layer(device, compiler, kind, method, shape, dtype, mode):
    """The output and the gradients of a layer by sparse GEMMs, against dense math on the same zeros, and in fp32."""
    from transformers.pytorch_utils import Conv1D

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
        layer = patched(partial(build, dtype), method, backend)
        x, grad = (draw(device, (tokens, n), BF16, seed=n).to(dtype) for n in (inputs, out))
        x.requires_grad_()
        forward = torch.compile(layer, fullgraph=True, backend=compiler) if mode == "fullgraph" else layer

        def call() -> list[Tensor]:
            output = forward(x)
            return [output, *torch.autograd.grad(output, [x, *layer.parameters()], grad)]

        return [result.detach() for result in (replayed(call) if mode == "CUDA graph" else call())]

    three = results("cusparselt", dtype, mode), results("dense", dtype), results("dense", torch.float32)
    for ours, dense, truth, name in zip(*three, (*NAMES, "grad_bias")):
        assert_three_way(ours, dense, truth, name)
