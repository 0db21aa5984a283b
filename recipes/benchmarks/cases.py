"""Calls of the kernels: a function, the arguments that it takes at any size, and how equal results must be.

`reference`, `gpu` and `cpu` hold functions of the same names and arguments. The benchmarks time the calls at the sizes
of real models; `tests/kernels/kernel_cases.py` compares them with the reference at small sizes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from types import ModuleType
from typing import Any

import sparse24_kernels as kernels
import torch
from sparse24_kernels import reference
from torch import Tensor

DTYPES = FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NAN, INF = float("nan"), float("inf")
SPECIAL = (0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, -1e-38, 3e38, -INF, NAN)
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """`function` is "module.name"; `make(device, *row)` makes its arguments, the same each time.

    Where the terms of a result cancel, no arithmetic gets the last bits of the remainder right: `terms(*arguments)`
    returns for each result a tensor of the size that its errors are measured against.
    """

    function: str
    name: str
    make: Callable[..., tuple]
    row: tuple = ()
    exact: bool = True
    terms: Callable[..., list[Tensor]] | None = None

    def __str__(self) -> str:
        return f"{self.function}-{self.name}"

    def arguments(self, device: torch.device) -> tuple:
        return self.make(device, *self.row)


def run(package: ModuleType, function: str, arguments: tuple) -> list[Tensor]:
    """What the function of a package returns, or changes in place."""
    results = getattr(package.OPERATORS, function.split(".")[1])(*arguments)
    if results is None:
        results = arguments[0]
    return [results] if isinstance(results, Tensor) else list(results)


def draw(device: torch.device, shape: Shape, dtype: torch.dtype = FP32, kind: str = "random", seed: int = 0) -> Tensor:
    """The same values each time: Gaussian, "ties" (small integers, with zeros), "bytes", or "special".

    "special" is `[n, 64]`, n at most 625: the groups of four special values in order, which are 10,000.
    """
    if kind == "special":
        return torch.tensor(list(product(SPECIAL, repeat=4)), dtype=dtype, device=device).view(-1, 64)[: shape[0]]
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed + sum(shape) + len(shape))
    if kind == "random":  # made in their dtype, because benchmarks draw a billion
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)
    low, high = (-3, 4) if kind == "ties" else (0, 256)
    return torch.randint(low, high, shape, generator=generator, device=device).to(dtype)


def on_weight(device, shape, dtype, kind, *settings):
    return draw(device, shape, dtype, kind), 2, 4, *settings


def prune(device, shape, dtype, kind, rule, dim, out, forms):
    """`rule` "any mask" keeps any number of every four, "mask" is transposable."""
    weight, mask = draw(device, shape, dtype, kind), None
    if "mask" in rule:
        any_mask = rule == "any mask"
        mask = draw(device, shape, kind="ties") > 0 if any_mask else kernels.transposable_mask(weight, packed=True)
    scale = torch.full((), 1.483, device=device) if rule == "soft-threshold" and kind == "random" else None
    return weight, rule.removeprefix("any "), 2, 4, dim, mask, scale, out, forms


def packed_matrix(device, shape, dtype, scale=1.0):
    weight = draw(device, shape) * scale
    return *reference.packed.pack_nm(weight.to(dtype), 2, 4), None, 4


def packed_linear(device, shape, dtype, tokens, bias=False):
    """Tokens of a layer whose weight is packed; the sums of their products have a variance of 1."""
    out, inputs = shape
    x, weight = draw(device, (tokens, inputs), dtype), packed_matrix(device, shape, dtype, inputs**-0.5)
    return x, *weight, draw(device, (out,), dtype) if bias else None


def packed_terms(x, values, mask, scales, m, bias):
    """The sums of the magnitudes."""
    bias = None if bias is None else bias.abs()
    return [reference.packed.packed_linear(x.abs(), values.abs(), mask, scales, m, bias)]


MVUE_KINDS = ((2, 4, "exact"), (2, 4, "approx"), (1, 2, "exact"))


def mvue(device, shape, dtype, kind, key, n, m, estimator, dim, form):
    key = torch.full((), key, device=device, dtype=torch.int64)
    return draw(device, shape, dtype, kind), key, n, m, dim, estimator, form


VALUES = {
    "special": (0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, -1e-38, 1e38, -INF, NAN),  # from 1.7e38 on, PyTorch's GELU overflows
    # Far into both tails, where exponentials overflow or vanish.
    "wide": (-1e4, -120.0, -89.0, -40.0, -9.0, -5.0, -1.3, -0.75, 1e-4, 0.5, 3.0, 11.0, 88.0, 90.0, 1e4),
}
GATED: dict[str, dict[str, Any]] = {  # The results are differences; errors are measured against these terms.
    "gated.gated_activation": {"terms": lambda gate, up, _: [gate * up]},
    "gated.gated_activation_backward": {"terms": lambda grad, gate, up, _: [grad * up, grad * gate]},
}
# Each returns its argument with the same values, in another layout; the last ones, a view of some of [66, 10].
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda x: x.contiguous(),
    "column": lambda x: x.t().contiguous().t(),
    # One half of a fused projection, in its two layouts.
    "half": lambda x: torch.cat([x, x + 1], -1)[..., : x.shape[-1]],
    "column-half": lambda x: torch.cat([x.t(), x.t() + 1])[: x.shape[1]].t(),
    "every-second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "offset": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),  # not aligned
    "expanded": lambda x: x[..., :1].expand(x.shape),  # as the gradient of a sum over the last dimension
    "scalar": lambda x: x[0, 0],
    "vector": lambda x: x[:, 0],
    "3d": lambda x: x.view(2, 3, 11, 10)[:, 0],
    "3d-swapped": lambda x: x.view(6, 11, 10).transpose(0, 1),
    "3d-reversed": lambda x: x.view(6, 11, 10).permute(2, 1, 0),
}


def gated(device, of, dtype, count, kind, mixture):
    """The last `count` of grad, gate and up: Gaussian of shape `of`, gate three times as large; or every three values
    of those that `of` is the name of. `mixture` has a layout of each, or several that follow each other."""
    if isinstance(of, str):
        found = list(torch.tensor(list(product(VALUES[of], repeat=3)), dtype=dtype, device=device).unbind(1))
    else:
        grad, gate, up = draw(device, (3, *of))
        found = [x.to(dtype) for x in (grad, 3 * gate, up)]
    for i, layouts in enumerate(mixture.split()):
        for layout in layouts.split("+"):
            found[i] = LAYOUTS[layout](found[i])
    return *found[-count:], kind
