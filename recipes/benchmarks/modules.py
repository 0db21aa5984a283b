"""Linear layers and MLP blocks, dense against sparse.

The MLP blocks are also timed with torchao's SemiSparseLinear (up to 0.18), and forward with PyTorch's
to_sparse_semi_structured, which has no backward.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product

import sparse24_kernels as kernels
import torch
from sparse24_kernels.gemm import GemmProblem
from torch import Tensor, nn

from .cases import BF16, draw
from .gemms import AUTO, LENGTH, MODELS, Layer, layers, published, sets_that_fill
from .sections import Row, Run, Section
from .timing import Call

METHODS = {"s-ste": 1.28, "t-sr-ste": 1.45}
"""Goals for layers: times dense from 8192 tokens on, with operands made in every call."""

Build = Callable[[], nn.Module]


def patched(
    build: Build, method: str, backend: str, operands: str = "made", target_modules: str = "all-linear"
) -> nn.Module:
    """A new module with sparse layers, and MVUE's random numbers fixed.

    Weight operands are "made" in every call; "kept" after the first one, as for later micro-batches of a step, but also
    while a CUDA graph is captured, when hf_sparse24 keeps nothing; or there are none: the weights are "packed".
    """
    from hf_sparse24 import Sparse24Config, pack_model, patch_model, sparse_weights

    parent = nn.ModuleList([build()])
    patch_model(parent, Sparse24Config(method=method, target_modules=target_modules, backend=backend))
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
    name, groups = "layers", ("layers", "models")
    note = (
        "Forward and backward. Kept: operands of an earlier micro-batch of the step; made, "
        "auto: pruned and compressed in every call."
    )

    def entries(self) -> list[Layer]:
        return layers()

    def problems(self, entry: Layer) -> list[GemmProblem]:
        return list(entry.problems().values())

    def ways(self, entry: Layer, device: torch.device) -> dict[str, Build]:
        """Each makes a module, which is trained or, where `entry.training` is false, run forward. One is dense."""
        return trained(partial(linear, entry.inputs, entry.out, entry.bias, device, entry.dtype))

    def goals(self, entry: Layer) -> dict[str, float]:
        made = {f"{method}, made": wanted for method, wanted in METHODS.items() if entry.tokens >= 8192}
        return made | {f"{method}, auto": AUTO for method in METHODS} | {"auto": AUTO}

    def measure(self, run: Run, entry: Layer) -> Row:
        device, sets = run.machine.device, range(sets_that_fill(run, entry))
        inputs = [draw(device, (entry.tokens, entry.inputs), entry.dtype, seed=2 * i) for i in sets]

        def make(build: Build) -> list[Call]:
            module = build()
            with torch.no_grad():
                shape = module(inputs[0]).shape
            if not entry.training:
                return [partial(torch.no_grad()(module), x) for x in inputs]
            grads = [draw(device, shape, entry.dtype, seed=2 * i + 1) for i in sets]
            return [partial(train, module, x.detach().requires_grad_(), grad) for x, grad in zip(inputs, grads)]

        makers = {way: partial(make, build) for way, build in self.ways(entry, device).items()}
        return run.compare(makers)


def train(module: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(module(x), [x, *module.parameters()], grad)


def trained(
    build: Build, target_modules: str = "all-linear", methods: Sequence[str] = tuple(METHODS)
) -> dict[str, Build]:
    """The dense module, and it made sparse by each method with its operands kept, made, and as `auto` runs it."""
    ways: dict[str, Build] = {"dense": build}
    for method in methods:
        for way, backend, operands in (
            ("kept", "cusparselt", "kept"),
            ("made", "cusparselt", "made"),
            ("auto", "auto", "made"),
        ):
            ways[f"{method}, {way}"] = partial(patched, build, method, backend, operands, target_modules)
    return ways


def linear(inputs: int, out: int, bias: bool, device: torch.device, dtype: torch.dtype = BF16) -> nn.Linear:
    """The same weights each time."""
    layer = nn.Linear(inputs, out, bias, device, dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(draw(device, tuple(parameter.shape), dtype) / inputs**0.5)
    return layer


class Mlp(nn.Module):
    """SwiGLU, with our fused activation or with PyTorch's two operations; or GELU."""

    def __init__(self, entry: Layer, device: torch.device, fused: bool = False):
        super().__init__()
        hidden, inner, bias, self.fused = entry.inputs, entry.out, entry.bias, fused
        make = partial(linear, bias=bias, device=device, dtype=entry.dtype)
        self.gate_proj = None if bias else make(hidden, inner)
        self.up_proj, self.down_proj = make(hidden, inner), make(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        if self.gate_proj is None:
            return self.down_proj(nn.functional.gelu(up, approximate="tanh"))
        gate = self.gate_proj(x)
        gated = kernels.gated_activation(gate, up, "swiglu") if self.fused else nn.functional.silu(gate) * up
        return self.down_proj(gated)


class Mlps(Layers):
    name, groups = "MLP blocks", ("mlps", "models")
    note = "As above; forward and backward makes operands in every call. Packed: weights in packed form alone."

    def entries(self) -> list[Layer]:
        kinds = product((8192, 32768, 2048), MODELS, (True, False))
        return [Layer(f"{model} MLP", *MODELS[model][::-1], tokens, training=x) for tokens, model, x in kinds]

    def problems(self, entry: Layer) -> list[GemmProblem]:
        return [problem for layer in entry.pair() for problem in layer.problems().values()]

    def ways(self, entry: Layer, device: torch.device) -> dict[str, Build]:
        build, fused = partial(Mlp, entry, device), partial(Mlp, entry, device, fused=True)
        ways: dict[str, Build] = {"dense": build}
        if not entry.bias:
            ways["dense, fused activation"] = fused
        if not entry.training:  # every method multiplies by the same kind of weight
            ways["packed"] = partial(patched, fused, "s-ste", "auto", "packed")
            ways["s-ste, auto"] = partial(patched, fused, "s-ste", "auto")
            return ways | {"torch to_sparse_semi_structured": lambda: by_torch(fused())}
        for method in METHODS:
            ways[method] = partial(patched, fused, method, "cusparselt")
            ways[f"{method}, auto"] = partial(patched, fused, method, "auto")
        return ways | {"torchao SemiSparseLinear": lambda: by_torchao(fused())}


class Block(nn.Module):
    """A transformer block of GPT-2 on sequences of `LENGTH` tokens, without dropout: the same weights each time."""

    def __init__(self, entry: Layer, heads: int, device: torch.device):
        from transformers import GPT2Config
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block

        super().__init__()
        sizes = {"n_embd": entry.inputs, "n_inner": entry.out, "n_head": heads, "n_positions": LENGTH}
        off = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
        config = GPT2Config(**sizes, **off, activation_function="gelu_pytorch_tanh", attn_implementation="sdpa")
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            torch.manual_seed(0)
            self.h = nn.ModuleList([GPT2Block(config, layer_idx=0)]).to(entry.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.h[0](x.view(-1, LENGTH, x.shape[-1]))


PAPERS_METHODS = ("t-sr-ste",)


class Papers(Mlps):
    """FFNs and transformer blocks at the sizes for which T-SR-STE's authors published times; the FFN alone is sparse.

    Their times leave out pruning and compressing weights: "kept" is what compares with them. The graphs of all ways are
    alive at once: those of a second method would not fit into 80 GB.
    """

    name, groups = "the papers' sizes", ("papers", "models")
    note = (
        "Forward and backward of GPT-2's FFN, and of the whole block with a sparse FFN. Kept, made, auto: as above. "
        "Published: how many times faster than dense T-SR-STE was on an RTX 3090 in fp16, weights compressed before."
    )

    def entries(self) -> list[Layer]:
        return [layer for both in zip(published("FFN"), published("block")) for layer in both]

    def ways(self, entry: Layer, device: torch.device) -> dict[str, Build]:
        if entry.name.endswith("FFN"):
            return trained(partial(Mlp, entry, device), methods=PAPERS_METHODS)
        return trained(partial(Block, entry, published("block")[entry].heads, device), "mlp", PAPERS_METHODS)

    def goals(self, entry: Layer) -> dict[str, float]:
        return {f"{method}, auto": AUTO for method in PAPERS_METHODS}

    def measure(self, run: Run, entry: Layer) -> Row:
        row, part = super().measure(run, entry), entry.name.split()[-1]
        size = published(part)[entry]
        row["facts"]["published, t-sr-ste, RTX 3090, fp16"] = size.ffn if part == "FFN" else size.block
        return row


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
