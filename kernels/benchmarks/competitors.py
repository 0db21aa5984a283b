"""What our kernels are compared with: plain PyTorch, torch.compile, PyTorch's own 2:4 search, Liger, a convolution.

A competitor gets the arguments of a workload, as its rooms take them, and returns a function of no arguments that does
the work, or most of it: where one leaves a part out (packed bits, say), that is in its favour, and its name says so.
"""

from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from itertools import product

import torch
from sparse24_kernels import reference
from torch import Tensor
from workloads import BF16, Workload, tensors

LOOPED = {("masks.count_flips", "eager PyTorch")}
"""What no CUDA graph can capture: this one takes a table from the host with every call."""

Call = Callable[[], object]
Competitor = Callable[[tuple], Call]


def competitors(workload: Workload) -> Iterator[tuple[str, Competitor]]:
    """Name and maker of each, the quick and safe ones first."""
    yield "eager PyTorch", lambda arguments: lambda: in_reference(workload, arguments)
    if workload.function == "transposable.transposable_mask":
        yield "90 patterns by conv2d (bool mask)", _on_weight(conv_search)
        yield "90 patterns by matmul (bool mask)", _on_weight(matmul_search)
    layout = workload.operation.name.split(", ")[-1]
    if workload.function.startswith("gated.") and layout == "row-major" and find_spec("liger_kernel"):
        yield "Liger", _liger
    if workload.function == "transposable.transposable_mask":
        yield "torch _sparse_semi_structured_tile (greedy, packs both ways)", _on_weight(tile)
    if workload.operation.name == "prune mask: packed+packed-transposed":
        yield "torch _sparse_semi_structured_tile (searches, greedy)", _on_weight(tile)


def in_reference(workload: Workload, arguments: tuple):
    """The same function in the other room."""
    file, name = workload.function.split(".")
    return getattr(getattr(reference, file), name)(*arguments)


def compiled(workload: Workload) -> Competitor:
    """The reference under torch.compile, compiled once, with the sizes as constants: what it can do at best."""
    made: list[Callable] = []

    def make(arguments: tuple) -> Call:
        if not made:
            torch._dynamo.reset()  # it counts how often one piece of code was compiled, and stops at eight
            made.append(torch.compile(lambda arguments: in_reference(workload, arguments), dynamic=False))
        return lambda: made[0](arguments)

    return make


def copy_of(size: int) -> Competitor:
    """A copy that reads and writes `size` bytes in all, on the device of the arguments."""

    def make(arguments: tuple) -> Call:
        source = torch.randint(256, (size // 2,), dtype=torch.uint8, device=tensors(arguments)[0].device)
        result = torch.empty_like(source)
        return lambda: result.copy_(source)

    return make


def _on_weight(function: Callable[[Tensor], object]) -> Competitor:
    return lambda arguments: lambda: function(arguments[0])


def tile(weight: Tensor):
    """PyTorch's fused search and pack of both orientations: half precision only, so an fp32 weight is cast first."""
    return torch._sparse_semi_structured_tile(weight.to(BF16))


@cache
def patterns(device: torch.device) -> Tensor:
    """The 90 masks of a 4x4 tile with two in every row and every column: fp32 `[90, 4, 4]`."""
    rows = torch.tensor([[i in kept for i in range(4)] for kept in product(range(4), repeat=2) if kept[0] < kept[1]])
    four = torch.stack([torch.stack(choice) for choice in product(rows.unbind(), repeat=4)])
    return four[(four.sum(1) == 2).all(1)].float().to(device)


def conv_search(weight: Tensor) -> Tensor:
    """The search as Hu et al. 2024 (arXiv 2404.01847), Algorithm 1, state it: a convolution of stride 4, and argmax."""
    masks = patterns(weight.device)
    scores = torch.nn.functional.conv2d(weight.abs()[None, None], masks[:, None].to(weight.dtype), stride=4)[0]
    return _assemble(masks, scores.argmax(0))


def matmul_search(weight: Tensor) -> Tensor:
    """The same scores as a product of all tiles, as rows of 16, with all patterns."""
    masks = patterns(weight.device)
    rows, columns = weight.shape[0] // 4, weight.shape[1] // 4
    tiles = weight.abs().view(rows, 4, columns, 4).transpose(1, 2).reshape(-1, 16)
    best = (tiles @ masks.view(90, 16).t().to(weight.dtype)).argmax(1)
    return _assemble(masks, best.view(rows, columns))


def _assemble(masks: Tensor, best: Tensor) -> Tensor:
    """bool `[4R, 4C]` from the number of a pattern for each of `[R, C]` tiles."""
    rows, columns = best.shape
    return masks.bool()[best].transpose(1, 2).reshape(4 * rows, 4 * columns)


def _liger(arguments: tuple) -> Call:
    """Liger's Triton kernels without its autograd function; its backward overwrites gate and up."""
    kind = arguments[-1]
    if kind == "swiglu":
        from liger_kernel.ops.swiglu import swiglu_backward as backward
        from liger_kernel.ops.swiglu import swiglu_forward as forward
    else:
        from liger_kernel.ops.geglu import geglu_backward as backward
        from liger_kernel.ops.geglu import geglu_forward as forward
    if len(arguments) == 3:
        gate, up, _ = arguments
        return lambda: forward(gate, up)
    grad, gate, up, _ = arguments
    return lambda: backward(gate, up, grad)
