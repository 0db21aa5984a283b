"""Sparse GEMMs: the three GEMMs of each layer of each model against dense ones.

The truth is fp32 math on the rounded operands. A sparse GEMM may be no further from it than twice what the dense GEMM
in the operands' dtype is. Every algorithm is checked so before it is timed, at the size at which it is timed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import sparse24_kernels as kernels
import torch
from sparse24_kernels.formats import turned
from sparse24_kernels.gemm import GemmPlan, GemmProblem, linear_problem, mm_problem, plan_gemm
from sparse24_kernels.gemm.backend import Operand, encode_one
from sparse24_kernels.prune import prune_forms
from torch import Tensor, nn

from .cases import BF16, FP16, draw
from .sections import Row, Run, Section
from .shapes import MODELS
from .timing import Call, Maker

NAMES = ("output", "grad_input", "grad_weight")
AUTO = 0.98  # a goal: times dense, of what `auto` runs, at every size
TIMED = ("Llama 8B", "Llama 1B", "GPT-2 774M", "Llama 13B")
TOKENS = (8192, 32768, 4096, 1024)


@dataclass(frozen=True)
class Layer:
    """A linear layer at a number of tokens, or one of its GEMMs."""

    name: str
    out: int
    inputs: int
    tokens: int
    gemm: str = ""
    dtype: torch.dtype = BF16
    bias = property(lambda self: self.name.startswith("GPT-2"))

    def __str__(self) -> str:
        text = f"{self.name} {self.out}x{self.inputs}, {self.tokens} tokens{', fp16' if self.dtype == FP16 else ''}"
        return f"{text}: {self.gemm}" if self.gemm else text

    def problems(self) -> dict[str, GemmProblem]:
        return {
            "output": linear_problem(self.tokens, self.out, self.inputs, self.dtype),
            "grad_input": linear_problem(self.tokens, self.inputs, self.out, self.dtype),
            "grad_weight": mm_problem(self.out, self.inputs, self.tokens, self.dtype),
        }


def mlp(model: str, tokens: int) -> list[Layer]:
    return [Layer(f"{model} {name}", *size, tokens) for name, size in MODELS[model].mlp().items()]


def linear_layers(model: str, tokens: int) -> list[Layer]:
    return mlp(model, tokens) + [
        Layer(f"{model} {name}", *size, tokens) for name, size in MODELS[model].attention().items()
    ]


def layers() -> list[Layer]:
    """Everything that is timed, what matters most first: time may run out."""
    found = []
    for tokens in TOKENS:
        found += [layer for model in TIMED for layer in mlp(model, tokens)]
        attention = [(model, *item) for model in TIMED for item in MODELS[model].attention().items()]
        found += [Layer(f"{model} {name}", *size, tokens) for model, name, size in attention]
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
        self.packed = self.encoded(self.plan) if self.plan.is_sparse else None

    def pruned(self, form: str = "dense") -> Tensor:
        """`a` with its zeros, in a form: by S-STE's rule, T-SR-STE's mask, or MVUE."""
        form = form if self.name == "output" else turned(form)
        if self.name == "grad_weight":
            return kernels.mvue(self.grad, dim=0, key=self.key, form=form)
        soft = {"rule": "soft-threshold", "scale": self.scale}
        rule: dict[str, Any] = soft if self.name == "output" else {"rule": "mask", "mask": self.mask}
        return prune_forms(self.weight, [form], **rule)[0]

    def encoded(self, plan: GemmPlan) -> Operand:
        return Operand(encode_one(plan.backend, self.pruned(plan.form), plan.form))

    def dense(self, a: Tensor, convert: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Tensor:
        if self.name == "grad_weight":
            return convert(a) @ convert(self.b)
        return nn.functional.linear(convert(self.b), convert(a), None if self.bias is None else convert(self.bias))

    def sparse(self, plan: GemmPlan, packed: Operand | None = None) -> Tensor:
        operand = self.encoded(plan) if packed is None else packed
        if self.name == "grad_weight":
            return kernels.sparse_mm(operand, self.b, plan=plan)
        return kernels.sparse_linear(self.b, operand, self.bias, plan=plan)

    def check(self, plan: GemmPlan) -> None:
        """Assert that the sparse GEMM is as exact as dense math."""
        assert self.packed is not None, plan.reason
        pruned = self.pruned()
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
    name, group = "GEMMs", "gemms"
    note = (
        "Sparse: the operand is compressed already; packing: pruned and compressed in the "
        "same call; default: by the library's default algorithm, untuned; "
        "auto: what `backend='auto'` runs."
    )

    def entries(self) -> list[Layer]:
        return [replace(layer, gemm=name) for layer in layers() for name in NAMES]

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
            if plan.algorithm:
                makers["default"] = partial(sparse, plan._replace(algorithm=0))
        row = run.compare(makers)
        if "us" in row["times"]["dense"]:
            flops = 2 * entry.tokens * entry.out * entry.inputs
            row["facts"]["dense, TFLOP/s"] = flops / row["times"]["dense"]["us"] / 1e6
        row["facts"] |= {"auto runs": auto.backend.name, "algorithm": plan.algorithm}
        # What auto runs is one of these: it is not measured twice.
        runs = "sparse" if auto.is_sparse else "dense"
        row["times"]["auto"] = row["times"][runs]
        row["facts"]["auto over dense"] = row["facts"].get(f"{runs} over dense", [1.0, 1.0, 1.0])
        return row


def sets_that_fill(run: Run, layer: Layer, most: int = 8) -> int:
    """How many sets of a layer's operands of 16 bits no call finds in the cache, at most `most`."""
    size = 2 * (layer.tokens * (layer.out + layer.inputs) + layer.out * layer.inputs)
    return max(1, min(most, -(-4 * run.machine.l2_bytes // size)))
