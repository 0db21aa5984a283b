"""MLP blocks forward and backward, ours against dense and against what others ship; then forward alone, for inference.

In training, every sparse way prunes and packs anew with each call, as the others cannot help doing. Others are whoever
can be imported: torchao's SemiSparseLinear (up to 0.18), and PyTorch's to_sparse_semi_structured, which has no
backward and so stands in the second table. Speed without right numbers is worth nothing, so the output of every way is
compared with dense math too: random weights pruned 2:4 by magnitude land at a certain distance, wrong ones far off.
"""

from collections.abc import Callable

import sparse24_kernels as kernels
import torch
from products import patch, training_call
from report import clean
from shapes import METHODS, Block
from side_by_side import NOT_RUN, forget, judged, randn, ratio, sets_that_fill, side_by_side, tune_first
from timing import OutOfTime, describe
from torch import Tensor, nn

TUNING = 0.4
AUTO = 0.98
OURS = [f"{method}{suffix}" for method in METHODS for suffix in ("", ", auto")]


class Mlp(nn.Module):
    """SwiGLU with our fused activation or with PyTorch's two operations; or GELU."""

    def __init__(self, block: Block, fused: bool):
        super().__init__()
        self.gated, self.fused = block.gated, fused
        if block.gated:
            self.gate_proj = nn.Linear(block.hidden, block.intermediate, block.bias)
        self.up_proj = nn.Linear(block.hidden, block.intermediate, block.bias)
        self.down_proj = nn.Linear(block.intermediate, block.hidden, block.bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        if not self.gated:
            return self.down_proj(nn.functional.gelu(up, approximate="tanh"))
        gate = self.gate_proj(x)
        inner = kernels.gated_activation(gate, up, "swiglu") if self.fused else nn.functional.silu(gate) * up
        return self.down_proj(inner)


def section(run) -> None:
    """Tune, then every block as far as the time goes."""
    result = run.result.setdefault("mlps", {})
    blocks = [block for block in run.blocks if run.options.only in str(block)]
    for block in blocks:
        result[str(block)] = {"flops": block.flops, "error": NOT_RUN}
    tune_first(run, (problem for block in blocks for problem in block.problems()), TUNING * run.left())
    for block in blocks:
        if run.left(reserve=10) < 0:
            return
        try:
            row = measure(run, block)
        except (Exception, OutOfTime) as error:
            row = {"error": clean(describe(error))}
        result[str(block)] = {"flops": block.flops} | row
        forget(run, str(block))
        run.write()


def measure(run, block: Block) -> dict:
    """Training and forward, each with all its ways in turn."""
    device, tokens = run.machine.device, block.tokens
    element = torch.finfo(torch.bfloat16).bits // 8
    count = sets_that_fill(run, 2 * tokens * block.hidden * element, most=4)
    xs, grads = (
        [randn(device, tokens, block.hidden, dtype=torch.bfloat16, seed=2 * i + j) for i in range(count)]
        for j in (0, 1)
    )
    reference = build(block, device)
    with torch.no_grad():
        dense = reference(xs[0])
    row: dict = {"goals": []}
    for table, ways in (("training", training_ways(block)), ("forward", forward_ways(block))):
        distances: dict[str, float] = {}
        calls = forward_calls if table == "forward" else training_calls
        makers = {}
        for name, make in ways.items():

            def maker(name=name, make=make, calls=calls, distances=distances):
                module, patched, keep = make(device)
                with torch.no_grad():
                    distances[name] = ((module(xs[0]) - dense).float().norm() / dense.float().norm()).item()
                return calls(module, patched, keep, xs, grads)

            makers[name] = maker
        rows, clocks = side_by_side(run, makers, 40)
        for name, times in rows.items():
            times |= {"distance_to_dense": distances.get(name), "speed_up": ratio(rows, "dense", name)}
        row[table] = {"rows": rows, "clocks": clocks}
        row["goals"] += goals(table, rows)
        forget(run, str(block))
    return row


def goals(table: str, rows: dict[str, dict]) -> list[dict]:
    """Ours ahead of every peer that ran; auto never behind dense, the faster one where there are two."""
    times = {name: row["median_us"] for name, row in rows.items() if "median_us" in row}
    best = min((name for name in times if name in METHODS), key=times.__getitem__, default=None)
    dense = min((name for name in times if name.startswith("dense")), key=times.__getitem__, default="dense")
    found = [judged(f"{table}, {name}: vs. {dense}", ratio(rows, dense, name), AUTO) for name in rows if "auto" in name]
    for peer in (name for name in times if name not in OURS and best is not None):
        found.append(judged(f"{table}, {best}: ahead of {peer}", ratio(rows, peer, best), 1.0))
    return found


Make = Callable[[torch.device], tuple[nn.Module, list[nn.Module], bool]]


def training_ways(block: Block) -> dict[str, Make]:
    ways: dict[str, Make] = {"dense": lambda device: (build(block, device), [], True)}
    if block.gated:
        ways["dense, fused activation"] = lambda device: (build(block, device, fused=True), [], True)
    for name in OURS:
        ways[name] = lambda device, name=name: ours(block, device, name, keep=False)
    ways["torchao SemiSparseLinear"] = lambda device: (torchao_block(block, device), [], True)
    return ways


def forward_ways(block: Block) -> dict[str, Make]:
    ways: dict[str, Make] = {"dense": lambda device: (build(block, device), [], True)}
    for name in ("s-ste", "s-ste, auto"):  # every method multiplies by the same kind of weight
        ways[name] = lambda device, name=name: ours(block, device, name, keep=True)
    ways["torch to_sparse_semi_structured"] = lambda device: (torch_block(block, device), [], True)
    return ways


def build(block: Block, device: torch.device, fused: bool = False) -> Mlp:
    """The same weights each time."""
    with torch.device("meta"):
        module = Mlp(block, fused).to(torch.bfloat16)
    module.to_empty(device=device)
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            size = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.02
            parameter.copy_(randn(device, *parameter.shape, dtype=torch.bfloat16, seed=seed) * size)
    return module


def ours(block: Block, device: torch.device, name: str, keep: bool) -> tuple[nn.Module, list[nn.Module], bool]:
    module = build(block, device, fused=True)
    backend = "auto" if name.endswith(", auto") else "cusparselt"
    return module, patch(nn.ModuleList([module]), name.removesuffix(", auto"), backend), keep


def torchao_block(block: Block, device: torch.device) -> nn.Module:
    from torchao.sparsity.training import SemiSparseLinear, swap_linear_with_semi_sparse_linear

    module = build(block, device)
    linears = {name: SemiSparseLinear for name, child in module.named_modules() if isinstance(child, nn.Linear)}
    swap_linear_with_semi_sparse_linear(module, linears)
    return module


def torch_block(block: Block, device: torch.device) -> nn.Module:
    from torch.sparse import to_sparse_semi_structured

    module = build(block, device)
    for child in module.modules():
        if isinstance(child, nn.Linear):
            sparse = to_sparse_semi_structured(kernels.nm_prune(child.weight.detach()))
            child.weight = nn.Parameter(sparse, requires_grad=False)
    return module


def training_calls(module, patched, keep, xs: list[Tensor], grads: list[Tensor]) -> list:
    return [training_call(module, patched, keep, x, grad) for x, grad in zip(xs, grads)]


def forward_calls(module, patched, keep, xs: list[Tensor], grads: list[Tensor]) -> list:
    module.eval()

    def call(x: Tensor) -> Tensor:
        with torch.no_grad():
            return module(x)

    return [lambda x=x: call(x) for x in xs]
