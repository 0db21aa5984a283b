"""Sparse GEMMs: the three GEMMs of each layer of each model against dense ones.

The truth is fp32 math on the rounded operands. A sparse GEMM may be no further from it than twice what the dense GEMM
in the operands' dtype is. Every algorithm is checked so before it is timed, at the size at which it is timed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import sparse24_kernels as kernels
import torch
from sparse24_kernels.gemm import GemmBackend, GemmPlan, GemmProblem, linear_problem, mm_problem, plan_gemm
from sparse24_kernels.gemm.backend import DENSE, Operand, encode_one, pruned_form
from sparse24_kernels.gemm.problem import Algorithm
from sparse24_kernels.prune import prune_forms
from torch import Tensor, nn

from .cases import BF16, FP16, draw
from .sections import Row, Run, Section
from .timing import Call, Maker

NAMES = ("output", "grad_input", "grad_weight")
AUTO = 0.98  # a goal: times dense, of what `auto` runs, at every size

MODELS = {"Llama 8B": (4096, 14336), "Llama 1B": (2048, 8192), "GPT-2 774M": (1280, 5120), "Llama 13B": (5120, 13824)}
"""Hidden and intermediate size of each model's MLPs."""

ATTENTION = {"Llama 8B query": (4096, 4096), "Llama 8B key": (1024, 4096), "Llama 1B query": (2048, 2048)}
ATTENTION |= {"Llama 1B key": (512, 2048), "GPT-2 774M qkv": (3840, 1280), "GPT-2 774M projection": (1280, 1280)}
ATTENTION |= {"Llama 13B query": (5120, 5120)}
"""Out and in of each layer."""

LENGTH = 2048
"""Tokens of a sequence at the published sizes."""


class Published(NamedTuple):
    """A GPT-2 layer that was timed elsewhere: so many sequences, heads and features; and how many times faster than
    dense its FFN (hidden to 4 hidden) and its whole transformer block were, None where it did not fit the GPU."""

    sequences: int
    heads: int
    hidden: int
    ffn: float
    block: float | None


PUBLISHED = [
    Published(64, 12, 768, 1.28, 1.08),
    Published(16, 12, 768, 1.42, 1.15),
    Published(4, 12, 768, 1.54, 1.18),
    Published(64, 16, 1024, 1.35, 1.12),
    Published(16, 16, 1024, 1.41, 1.16),
    Published(4, 16, 1024, 1.48, 1.19),
    Published(64, 32, 2048, 1.53, 1.21),
    Published(16, 32, 2048, 1.57, 1.23),
    Published(4, 32, 2048, 1.60, 1.26),
    Published(32, 32, 2560, 1.59, 1.25),
    Published(4, 32, 2560, 1.62, 1.26),
    Published(32, 32, 4096, 1.60, 1.28),
    Published(8, 32, 4096, 1.60, 1.28),
    Published(16, 40, 5120, 1.62, 1.30),
    Published(4, 40, 5120, 1.61, 1.29),
    Published(8, 56, 7168, 1.63, 1.31),
    Published(4, 72, 9216, 1.62, 1.31),
    Published(1, 96, 12288, 1.54, None),
]
"""T-SR-STE on an RTX 3090 in fp16 (Hu et al. 2024, arXiv 2404.01847): medians of the authors' raw logs, branch `bak` of
github.com/thu-ml/2by4-pretrain-acc-examples. Forward and backward with MVUE; without pruning and compressing weights,
mask search, masked decay and the optimizer."""


@dataclass(frozen=True)
class Layer:
    """A linear layer at a number of tokens, one of its GEMMs, or a module with the same sizes; trained or not."""

    name: str
    out: int
    inputs: int
    tokens: int
    gemm: str = ""
    training: bool = True
    dtype: torch.dtype = BF16
    bias = property(lambda self: self.name.startswith("GPT-2"))

    def __str__(self) -> str:
        text = f"{self.name} {self.out}x{self.inputs}, {self.tokens} tokens{', fp16' if self.dtype == FP16 else ''}"
        return text + (f": {self.gemm}" if self.gemm else "" if self.training else ", forward")

    def problems(self) -> dict[str, GemmProblem]:
        return {
            "output": linear_problem(self.tokens, self.out, self.inputs, self.dtype),
            "grad_input": linear_problem(self.tokens, self.inputs, self.out, self.dtype),
            "grad_weight": mm_problem(self.out, self.inputs, self.tokens, self.dtype),
        }

    def pair(self) -> list["Layer"]:
        """The two linear layers of an MLP, or of a block's MLP, that this names."""
        down = replace(self, name=f"{self.name} down", out=self.inputs, inputs=self.out)
        return [replace(self, name=f"{self.name} up"), down]


def mlp(model: str, tokens: int) -> list[Layer]:
    hidden, inner = MODELS[model]
    return Layer(f"{model} MLP", inner, hidden, tokens).pair()


def published(part: str) -> dict[Layer, Published]:
    """The published sizes as layers that `part` names, in fp16, as they were timed, and in bf16."""
    sizes = product((FP16, BF16), PUBLISHED)
    return {
        Layer(f"GPT-2 {part}", 4 * size.hidden, size.hidden, size.sequences * LENGTH, dtype=dtype): size
        for dtype, size in sizes
    }


def layers() -> list[Layer]:
    """Everything that is timed, what matters most first: time may run out."""
    found = []
    for tokens in (8192, 32768, 4096, 1024):
        found += [layer for model in MODELS for layer in mlp(model, tokens)]
        found += [Layer(name, *size, tokens) for name, size in ATTENTION.items()]
    return found


class Operands:
    """One GEMM: `a` `[m, k]`, which becomes sparse, and `b`, dense; with the ways to multiply them."""

    def __init__(self, layer: Layer, name: str, device: torch.device, seed: int = 0, zeros: int = 0):
        self.name, make = name, partial(draw, device, dtype=layer.dtype)
        x, self.grad = (make((layer.tokens, n), seed=3 * seed + i) for i, n in enumerate((layer.inputs, layer.out)))
        self.grad[:zeros] = 0
        self.weight = make((layer.out, layer.inputs), seed=3 * seed + 2) / layer.inputs**0.5
        # Without zeros, which small numbers become in fp16, every group of four has one way to be stored.
        self.weight = torch.where(self.weight.abs() < 1e-4, 1e-4, self.weight)
        self.bias = make((layer.out,)) if layer.bias and name == "output" else None
        self.a = {"output": self.weight, "grad_input": self.weight.t(), "grad_weight": self.grad.t()}[name]
        self.b = self.grad if name == "grad_input" else x
        self.plan: GemmPlan = plan_gemm(layer.problems()[name], device, "cusparselt")
        self.scale, self.key = kernels.s_ste_scale(self.weight), torch.tensor(7, device=device)
        self.mask = kernels.transposable_mask(self.weight, packed=True)
        self.packed = self.encoded(self.plan.backend) if self.plan.is_sparse else None

    def pruned(self, backend: GemmBackend = DENSE) -> tuple[Tensor, str]:
        """`a` with its zeros in the form that a backend takes, and that: by S-STE's rule, T-SR-STE's mask, or MVUE."""
        source = self.grad if self.name == "grad_weight" else self.weight
        form = pruned_form(backend, source, self.name != "output", source.dtype)
        if self.name == "grad_weight":
            return kernels.mvue(self.grad, dim=0, key=self.key, form=form), form
        soft = {"rule": "soft-threshold", "scale": self.scale}
        rule: dict[str, Any] = soft if self.name == "output" else {"rule": "mask", "mask": self.mask}
        return prune_forms(self.weight, [form], **rule)[0], form

    def encoded(self, backend: GemmBackend) -> Operand:
        return Operand(encode_one(backend, *self.pruned(backend)))

    def dense(self, a: Tensor, convert: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Tensor:
        if self.name == "grad_weight":
            return convert(a) @ convert(self.b)
        return nn.functional.linear(convert(self.b), convert(a), None if self.bias is None else convert(self.bias))

    def sparse(self, plan: GemmPlan, packed: Operand | None = None) -> Tensor:
        operand = self.encoded(plan.backend) if packed is None else packed
        if self.name == "grad_weight":
            return kernels.sparse_mm(operand, self.b, plan=plan)
        return kernels.sparse_linear(self.b, operand, self.bias, plan=plan)

    def check(self, plan: GemmPlan) -> None:
        """Assert that the sparse GEMM is as exact as dense math."""
        assert self.packed is not None, plan.reason
        pruned, _ = self.pruned()
        assert_three_way(
            self.sparse(plan, self.packed), self.dense(pruned), self.dense(pruned, Tensor.float), self.name
        )


def assert_three_way(ours: Tensor, dense: Tensor, truth: Tensor, what: str) -> None:
    """Assert that a result is no further from the truth than twice the dense result, plus one rounding.

    By norm, and at the worst element.
    """
    assert (ours.shape, ours.dtype) == (truth.shape, dense.dtype), f"{what}: {ours.shape}, {ours.dtype}"
    truth, eps = truth.to(torch.promote_types(truth.dtype, torch.float32)), torch.finfo(ours.dtype).eps
    for name, size in (("norm", torch.linalg.vector_norm), ("largest", lambda x: x.abs().max())):
        error, allowed = size(ours - truth).item(), 2 * size(dense - truth).item() + eps * size(truth).item()
        assert error <= allowed, f"{what}: error {error:.3g} ({name}), at most {allowed:.3g} is allowed"


class Gemms(Section):
    name, groups = "GEMMs", ("gemms",)
    note = (
        "Sparse: the operand is compressed already; packing: pruned and compressed in the "
        "same call; default: by the library's default algorithm, untuned; "
        "auto: what `backend='auto'` runs."
    )

    def entries(self) -> list[Layer]:
        of_papers = [layer for ffn in published("FFN") for layer in ffn.pair()]
        return [replace(layer, gemm=name) for layer in [*layers(), *of_papers] for name in NAMES]

    def problems(self, entry: Layer) -> list[GemmProblem]:
        return [entry.problems()[entry.gemm]]

    def goals(self, entry: Layer) -> dict[str, float]:
        return {"auto": AUTO} | ({"sparse, packing": 1.5} if entry.gemm == "output" and entry.tokens >= 8192 else {})

    def measure(self, run: Run, entry: Layer) -> Row:
        device = run.machine.device
        sets = [Operands(entry, entry.gemm, device, seed=seed) for seed in range(sets_that_fill(run, entry))]
        plan, auto = sets[0].plan, plan_gemm(self.problems(entry)[0], device)

        def sparse(plan: GemmPlan, packing: bool = False) -> list[Call]:
            sets[0].check(plan)
            return [partial(x.sparse, plan, None if packing else x.packed) for x in sets]

        # Dense: of an operand without zeros; with them it would draw less power and run faster.
        makers: dict[str, Maker] = {"dense": lambda: [partial(operands.dense, operands.a) for operands in sets]}
        if plan.is_sparse:
            makers["sparse"] = partial(sparse, plan)
            makers["sparse, packing"] = partial(sparse, plan, packing=True)
            if plan.algorithm != Algorithm():
                makers["default"] = partial(sparse, plan._replace(algorithm=Algorithm()))
        row = run.compare(makers)
        if "us" in row["times"]["dense"]:
            flops = 2 * entry.tokens * entry.out * entry.inputs
            row["facts"]["dense, TFLOP/s"] = flops / row["times"]["dense"]["us"] / 1e6
        row["facts"] |= {"auto runs": auto.backend.name, "algorithm": plan.algorithm}
        # What auto runs is one of these: it is not measured twice.
        row["times"]["auto"] = row["times"]["sparse" if auto.is_sparse else "dense"]
        return row


def sets_that_fill(run: Run, layer: Layer, most: int = 8) -> int:
    """How many sets of a layer's operands of 16 bits no call finds in the cache, at most `most`."""
    size = 2 * (layer.tokens * (layer.out + layer.inputs) + layer.out * layer.inputs)
    return max(1, min(most, -(-4 * run.machine.l2_bytes // size)))
