"""Which products of which models are timed, and what they cost: the layers of GPT-2 and Llama at 1k to 32k tokens."""

from dataclasses import dataclass

import torch
from sparse24_kernels.cusparselt import Problem, why_not_matrix

BF16 = torch.bfloat16
DENSE_RATE = 790e12
"""FLOP/s that a dense bf16 product of random numbers reaches on an H200; for predictions alone."""

METHODS = ("s-ste", "t-sr-ste")


@dataclass(frozen=True)
class Layer:
    """A linear layer of a model."""

    model: str
    name: str
    out: int
    inputs: int
    bias: bool = False


@dataclass(frozen=True)
class Cell:
    """A layer at a number of tokens. One row of the tables."""

    layer: Layer
    tokens: int
    dtype: torch.dtype = BF16

    def __str__(self) -> str:
        return f"{self.layer.model} {self.layer.name} {self.layer.out}x{self.layer.inputs}, {self.tokens} tokens"

    @property
    def flops(self) -> int:
        """Of one of the three products, done densely."""
        return 2 * self.tokens * self.layer.out * self.layer.inputs

    def problems(self) -> dict[str, Problem]:
        """The three products, as `plan_linear` and `plan_mm` state them."""
        tokens, out, inputs = self.tokens, self.layer.out, self.layer.inputs
        return {
            "output": Problem(out, tokens, inputs, self.dtype, True, True),
            "grad_input": Problem(inputs, tokens, out, self.dtype, True, True),
            "grad_weight": Problem(out, inputs, tokens, self.dtype, False, False),
        }


def possible(problems: list[Problem]) -> list[Problem]:
    """Each once, without those that no sparse product can do."""
    return [p for p in dict.fromkeys(problems) if why_not_matrix(p.m, p.k, p.dtype) is None]


def mlp_layers(model: str, hidden: int, intermediate: int, bias: bool = False) -> list[Layer]:
    return [
        Layer(model, "MLP up", intermediate, hidden, bias),
        Layer(model, "MLP down", hidden, intermediate, bias),
    ]


MLPS = [
    *mlp_layers("Llama 8B", 4096, 14336),
    *mlp_layers("Llama 1B", 2048, 8192),
    *mlp_layers("GPT-2 774M", 1280, 5120, True),
    *mlp_layers("Llama 13B", 5120, 13824),
]
ATTENTION = [
    Layer("Llama 8B", "query", 4096, 4096),
    Layer("Llama 8B", "key", 1024, 4096),
    Layer("Llama 1B", "query", 2048, 2048),
    Layer("Llama 1B", "key", 512, 2048),
    Layer("GPT-2 774M", "qkv", 3840, 1280, True),
    Layer("GPT-2 774M", "projection", 1280, 1280, True),
    Layer("Llama 13B", "query", 5120, 5120),
]


def cells() -> list[Cell]:
    """All, what matters most first: time may run out."""
    order = [(MLPS, 8192), (MLPS, 32768), (ATTENTION, 8192), (MLPS, 4096), (MLPS, 1024)]
    order += [(ATTENTION, tokens) for tokens in (32768, 4096, 1024)]
    return [Cell(layer, tokens) for layers, tokens in order for layer in layers]


@dataclass(frozen=True)
class Block:
    """An MLP at a number of tokens: gated (SwiGLU, three layers) or not (GELU, two)."""

    model: str
    hidden: int
    intermediate: int
    gated: bool
    tokens: int
    bias: bool = False

    def __str__(self) -> str:
        kind = "SwiGLU" if self.gated else "GELU"
        return f"{self.model} {kind} {self.hidden}-{self.intermediate}, {self.tokens} tokens"

    @property
    def flops(self) -> int:
        """Of its products, forward and backward, done densely."""
        return 3 * (3 if self.gated else 2) * 2 * self.tokens * self.hidden * self.intermediate

    def problems(self) -> list[Problem]:
        layers = mlp_layers(self.model, self.hidden, self.intermediate)
        return [problem for layer in layers for problem in Cell(layer, self.tokens).problems().values()]


BLOCKS = [
    Block(*sizes, tokens, bias)
    for tokens in (8192, 32768, 2048)
    for *sizes, bias in (
        ("Llama 8B", 4096, 14336, True, False),
        ("Llama 1B", 2048, 8192, True, False),
        ("GPT-2 774M", 1280, 5120, False, True),
        ("Llama 13B", 5120, 13824, True, False),
    )
]
