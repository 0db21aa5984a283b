"""Speed of the kernels: every public operation at the sizes of GPT-2 and Llama, next to a copy and its baselines.

A workload is a case: `pytest -m gpu` compares it with the reference. Here the public function that takes the same
arguments is timed.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import sparse24_kernels as kernels
import torch
from sparse24_kernels import Packed, reference
from sparse24_kernels.gemm.backend import GemmPlan
from sparse24_kernels.gemm.packed import PACKED
from sparse24_kernels.operators import Pruning
from sparse24_kernels.prune import prune_forms
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._pytree import tree_leaves

from . import cases
from .cases import BF16, FP32
from .sections import Row, Run, Section
from .shapes import MODELS
from .timing import Call

Shape = tuple[int, int]
Shapes = list[tuple[torch.dtype, Shape]]

NAMES = ("GPT-2 124M", "GPT-2 355M", "GPT-2 774M", "GPT-2 1.5B", "Llama 1B", "Llama 8B")
SIZES = [(MODELS[name].hidden, MODELS[name].inner) for name in NAMES]
WEIGHTS: Shapes = list(product((FP32, BF16), SIZES))
BF16_TOKENS: Shapes = [(BF16, shape) for shape in ((4096, 3072), (8192, 6400), (8192, 14336), (32768, 8192))]
TOKENS: Shapes = [*BF16_TOKENS, (FP32, (8192, 6400))]  # tokens x features
LAYERS: Shapes = [(BF16, shape) for shape in ((4096, 4096), (4096, 14336), (14336, 4096))]  # out x in, of Llama 8B


@dataclass(frozen=True, kw_only=True)
class Workload:
    """An operator's call at one of the sizes that matter; `make(device, *row)` makes the arguments that
    `sparse24_kernels.reference` takes, the same each time. The row begins with shape and dtype."""

    operator: str
    name: str
    make: Callable[..., tuple]
    row: tuple
    target: float = 0.8  # of the bandwidth of a copy

    def __str__(self) -> str:
        return f"{self.name} {self.shape[0]}x{self.shape[1]} {str(self.dtype).removeprefix('torch.')}"

    shape = property(lambda self: self.row[0])
    dtype = property(lambda self: self.row[1])
    public = property(lambda self: PUBLIC.get(self.operator) or getattr(kernels, self.operator))

    def at(self, shape: Shape) -> "Workload":
        return replace(self, row=(shape, *self.row[1:]))

    def arguments(self, device: torch.device) -> tuple:
        return self.make(device, *self.row)

    def call(self, arguments: tuple, compiled: Callable[..., Any] | None = None) -> Any:
        """The result of the public function."""
        return (compiled or self.public)(*arguments)

    def bytes(self) -> int:
        """Bytes that must be read and written: inputs and results, each once."""
        arguments = self.arguments(torch.device("meta"))
        read, written = (sum(x.nbytes for x in tensors(found)) for found in (arguments, self.call(arguments)))
        return read + written


def tensors(x: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]


def workloads() -> Iterator[Workload]:
    for operator, name, shapes, make, *settings in _operations():
        target = 0.6 if operator == "transposable_mask" else 0.8
        for dtype, shape in shapes:
            yield Workload(operator=operator, name=name, make=make, row=(shape, dtype, *settings), target=target)


def _operations() -> Iterator[tuple]:
    """Operator, name, shapes, maker of arguments, and what it takes after shape and dtype."""
    # fp32 or bf16 weights in, bf16 operands of a GEMM out.
    one_way = (["dense"], ["dense", "transposed"], ["sm90"])
    rows = [(rule, 1, forms) for rule, forms in product(("magnitude", "soft-threshold", "mask"), one_way)]
    rows.append(("mask", 1, ["sm90", "sm90-transposed"]))
    rows += [(rule, 0, ["dense"]) for rule in ("magnitude", "soft-threshold")]
    for rule, dim, forms in rows:
        name = f"prune {rule}{'' if dim else ', columns'}: {'+'.join(forms)}"
        yield "prune", name, WEIGHTS, cases.prune, Pruning(rule, dim=dim, dtype=BF16, forms=forms)
    for name, dim in (("rows", 1), ("columns", 0)):
        yield "nm_mask", f"nm_mask bits, {name}", WEIGHTS, cases.on_weight, dim, True
    yield "transposable_mask", "transposable mask bits", WEIGHTS, cases.on_weight, "exact", True
    yield "unpack_nm", "unpack", WEIGHTS[len(SIZES) :], cases.packed_matrix
    for tokens in (1, 16, 64):
        yield "packed_linear", f"packed_linear, tokens: {tokens}", LAYERS, cases.packed_linear, tokens

    # MVUE: groups along tokens are those of dW, groups along features those of dX.
    along_dims = (("tokens", 0), ("features", 1))
    for kind, (along, dim), form in product(cases.MVUE_KINDS, along_dims, ("dense", "transposed")):
        name = "mvue {}:{} {}".format(*kind)
        yield "mvue", f"{name}, {along}: {form}", TOKENS, cases.mvue, *kind, dim, form
    for kind in cases.MVUE_KINDS:
        name = "mvue {}:{} {}".format(*kind)
        yield "mvue", f"{name}, tokens: compressed", BF16_TOKENS, cases.mvue, *kind, 0, "sm90-transposed"

    for kind, layout in product(("swiglu", "geglu"), ("row", "column")):
        for count, way in ((2, "forward"), (3, "backward")):
            operator = "gated_activation" if count == 2 else "gated_activation_backward"
            yield operator, f"{kind} {way}, {layout}-major", TOKENS, cases.gated, count, kind, layout == "column"


def _prune(weight: Tensor, how: Pruning) -> list[Tensor]:
    settings = {"mask": how.mask, "scale": how.scale, "dtype": how.dtype}
    return prune_forms(weight, how.forms, how.rule, how.n, how.m, how.dim, **settings)


def _mvue(x, key, n, m, dim, estimator, form, *_):
    return kernels.mvue(x, n, m, dim, estimator, key=key, form=form)


PUBLIC: dict[str, Callable[..., Any]] = {
    "gated_activation_backward": lambda *arguments: torch.ops.sparse24.gated_activation_backward(*arguments),
    "mvue": _mvue,
    "prune": _prune,
    "packed_linear": lambda x, values, mask, scales, m, bias: kernels.packed_linear(
        x, Packed(values, mask, scales, m), bias, plan=GemmPlan(PACKED, "what is measured")
    ),
    "unpack_nm": lambda *packed: kernels.unpack_nm(Packed(*packed)),
}
"""The public functions that differ in name, arguments or home from those of `reference`."""


Baseline = Callable[[tuple], Call]
"""Gets the arguments of a workload, as `reference` takes them. What it leaves out (packed bits, say) favours it."""
COPY = "copy of as many bytes"

# A compilation takes seconds, so one workload of each kind has this baseline. The transposable reference loops over
# parts of the matrix, and each part would be compiled.
COMPILED = re.compile(
    r"prune (magnitude|soft-threshold): dense$|prune mask: dense\+transposed|unpack|"
    r"nm_mask bits, rows|mvue .*tokens: dense|.*row-major"
)


class Operations(Section):
    name, group = "kernels", "kernels"
    note = "GB/s: of the bytes that must move."

    def entries(self) -> list[Workload]:
        """The last shape of every operation, which has baselines, before the others."""
        found = list(workloads())
        self.with_baselines = list({(workload.name, workload.dtype): workload for workload in found}.values())
        return [*self.with_baselines, *(workload for workload in found if workload not in self.with_baselines)]

    def goals(self, entry: Workload) -> dict[str, float]:
        return {"ours": entry.target}

    def measure(self, run: Run, entry: Workload) -> Row:
        size = entry.bytes()
        # So many that no call finds its inputs in the cache.
        sets = [entry.arguments(run.machine.device) for _ in range(min(64, -(-4 * run.machine.l2_bytes // size)))]
        ways: dict[str, Baseline] = {COPY: partial(copy_of, size), "ours": lambda found: partial(entry.call, found)}
        ways |= baselines(entry) if entry in self.with_baselines else {}
        makers = {way: partial(lambda make: [make(x) for x in sets], make) for way, make in ways.items()}
        row = run.compare(makers)
        ours = row["times"]["ours"]
        if "us" in ours:
            row["facts"]["GB/s"] = size / ours["us"] / 1e3
        return row


def baselines(workload: Workload) -> Iterator[tuple[str, Baseline]]:
    """The name and the maker of each, the quick and safe ones first."""
    operator = getattr(reference.OPERATORS, workload.operator)

    def computed(arguments: tuple) -> Any:
        return operator(*arguments)

    yield "eager PyTorch", lambda found: partial(computed, found)
    if workload.name == "transposable mask bits":
        # In half precision only, so an fp32 weight is cast first.
        name = "torch _sparse_semi_structured_tile (greedy; solves for the mask and packs both ways)"
        yield name, lambda found: lambda: torch._sparse_semi_structured_tile(found[0].to(BF16))
    if workload.operator == "packed_linear":
        name = "cuBLAS on the dense weight"
        yield name, lambda found: partial(linear, found[0], kernels.unpack_nm(Packed(*found[1:5])))
    if COMPILED.match(workload.name):
        torch._dynamo.reset()  # it counts how often one piece of code was compiled, and stops at eight
        compiled = torch.compile(computed, dynamic=False)  # the sizes are constants: what it can do at best
        yield "torch.compile", lambda found: partial(compiled, found)


def copy_of(size: int, arguments: tuple) -> Call:
    """A copy that reads and writes `size` bytes in all, on the device of the arguments."""
    source = torch.randint(256, (size // 2,), dtype=torch.uint8, device=tensors(arguments)[0].device)
    result = torch.empty_like(source)
    return lambda: result.copy_(source)
