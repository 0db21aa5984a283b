"""Hard problems for each operator, and where an implementation solves them differently from the reference.

They have ties, zeros, subnormals, inf, NaN, empty tensors, and sizes that fill no tile. Results must be equal bit for
bit, except for sums and approximate functions, whose errors are bounded as `kernels/README.md` says.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, product

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._pytree import tree_map_only

from . import reference
from .formats import scale_columns
from .operators import Pruning

UNIT = torch.finfo(torch.float32).eps

SHAPES = ((68, 72), (0, 8))
"""Rows and columns of weights: more than a tile and no multiple of it, and empty."""

PATTERNS = ((2, 4), (16, 32), (6, 8), (1, 8), (31, 64))
"""Of packed weights."""

INEXACT = ("gated_activation", "gated_activation_backward", "packed_mm", "packed_linear")
"""Operators with sums or approximate functions. The results of all others are equal bit for bit."""

Results = Tensor | Sequence[Tensor] | None


def first_difference(operator: str, function: Callable[..., Results], device: torch.device, dtype: torch.dtype) -> str:
    """The first problem that `function` solves differently, and how; "" where it solves all as the reference does."""
    found = (compare(operator, function, arguments) for arguments in problems(operator, device, dtype))
    return next(filter(None, found), "")


def compare(operator: str, function: Callable[..., Results], arguments: tuple) -> str:
    """How the results of `function` differ from those of the reference; "" where they do not."""
    solve = getattr(reference.OPERATORS, operator)
    wide = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, arguments)
    expected = _results(solve, arguments)
    bounds, truths = (_bounds(operator, wide), _results(solve, wide)) if operator in INEXACT else ([], expected)
    with nan_in_new_memory():
        actual = _results(function, arguments)
    for i, (ours, theirs, truth) in enumerate(zip(actual, expected, truths, strict=True)):
        if different := difference(ours, theirs, truth, bounds[i] if bounds else None):
            shapes = tree_map_only(Tensor, lambda x: f"{x.dtype} {list(x.shape)}", arguments)
            return f"{operator}({', '.join(map(str, shapes))}): {different}".replace("torch.", "")
    return ""


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """Fill new memory with NaN, so that what a kernel does not write shows."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def difference(ours: Tensor, theirs: Tensor, truth: Tensor, bound: Tensor | None = None) -> str:
    """How a result differs from the reference's; "" where it does not.

    Without a bound the two are equal bit for bit, and any NaN equals any other. With one, `ours` may be further from
    the truth (fp64) than `theirs` is, by at most that.
    """
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return f"{ours.dtype} {tuple(ours.shape)}, the reference has {theirs.dtype} {tuple(theirs.shape)}"
    if bound is None:
        integer = reference.masks.integer_of(ours)
        same = ours.contiguous().view(integer) == theirs.contiguous().view(integer)
    else:
        same = (ours == theirs) | ((ours - truth).abs() <= (theirs - truth).abs() + bound)
    same |= ours.isnan() & theirs.isnan()
    if same.all():
        return ""
    i = tuple((~same).nonzero()[0].tolist())
    first = f"first {ours[i].item()} at {list(i)}, where the reference has {theirs[i].item()}"
    return f"{int((~same).sum())} of {same.numel()} elements differ, {first}"


def _results(function: Callable[..., Results], arguments: tuple) -> list[Tensor]:
    """The results of a function, returned or made in place."""
    arguments = tree_map_only(Tensor, lambda x: torch.empty_like(x).copy_(x), arguments)  # keeps strides
    results = function(*arguments)
    results = arguments[0] if results is None else results
    return [results] if isinstance(results, Tensor) else list(results)


def problems(operator: str, device: torch.device, dtype: torch.dtype) -> Iterator[tuple]:
    """The arguments of each problem of an operator."""

    def numbers(*shape: int, of: torch.dtype = dtype, seed: float = 0.0) -> Tensor:
        """Between -2 and 2, as good as random."""
        count = torch.arange(math.prod(shape), dtype=torch.float64, device="cpu")
        return (count * 0.7390851 + seed).sin().mul(2).view(shape).to(device, of)

    def packed(rows: int, k: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None, int]]:
        """Of several patterns, with values of `dtype`, and with int8 ones and scales."""
        for n, m in PATTERNS:
            if not k % m:
                values, mask = reference.packed.pack_nm(numbers(rows, k), n, m)
                yield values, mask, None, m
                yield (values * 60).to(torch.int8), mask, numbers(rows, scale_columns(k), seed=2.0).abs(), m

    values = (0.0, -0.0, 1.0, -torch.finfo(dtype).smallest_normal / 4, -math.inf, math.nan)
    special = torch.tensor(list(product(values, repeat=4)), dtype=dtype, device=device).view(108, 48)
    weights = [special, *(x for shape in SHAPES for x in (numbers(*shape).mul(1.5).round(), numbers(*shape)))]
    wide = [special.view(81, 64)[:64], numbers(64, 128).mul(1.5).round()]
    key = torch.full((), 2**40 + 5, dtype=torch.int64, device=device)
    scale, half = torch.full((), 1.483, dtype=torch.float32, device=device), torch.bfloat16
    both = ["dense", "transposed"]

    def bits(weight: Tensor) -> Tensor:
        return reference.transposable.transposable_mask(weight, 2, 4, "exact", True)

    match operator:
        case "nm_mask":
            yield from ((weight, 2, 4, dim, bool(dim)) for weight in weights for dim in (0, 1))
            yield numbers(72, 68).t(), 2, 4, 1, False
            yield numbers(2, 8, 12), 2, 4, 1, True
            yield from ((x, n, m, dim, False) for x in wide for dim in (0, 1) for n, m in PATTERNS)
        case "transposable_mask":
            yield from ((weight, 2, 4, "exact", bool(i % 2)) for i, weight in enumerate(weights))
        case "prune":
            for weight in weights:
                some = numbers(*weight.shape, of=torch.float32) > 0.5  # any number of every four
                for how in (
                    Pruning("magnitude", dim=0, dtype=dtype),
                    Pruning("magnitude", dim=1, dtype=half),
                    Pruning("soft-threshold", dim=0, scale=scale, dtype=dtype, forms=both),
                    Pruning("soft-threshold", dim=1, dtype=half),
                    Pruning("mask", dim=1, mask=some, dtype=dtype, forms=both[::-1]),
                    Pruning("mask", dim=1, mask=bits(weight), dtype=half, forms=both),
                ):
                    yield weight, how
            for weight in (special[:64, :32], numbers(96, 64).mul(1.5).round(), numbers(32, 0)):
                for dim, form in enumerate(("packed-transposed", "packed")):
                    some = reference.masks.nm_mask(weight, 2, 4, dim, False)
                    for how in (
                        Pruning("magnitude", dim=dim, forms=[form, "dense"]),
                        Pruning("soft-threshold", dim=dim, scale=scale if dim else None, forms=[form, "dense"]),
                        Pruning("mask", dim=dim, mask=some, forms=[form, "dense"]),
                    ):
                        yield weight, how
                yield weight, Pruning("mask", dim=1, mask=bits(weight), forms=["packed-transposed", "packed"])
            for weight, result in product(wide, (half, torch.float16)):
                forms = ["sm90", "sm90-transposed", "dense"]
                yield weight, Pruning("mask", dim=1, mask=bits(weight), dtype=result, forms=forms)
                yield weight, Pruning("magnitude", dim=1, dtype=result, forms=["sm90"])
                yield weight, Pruning("soft-threshold", dim=0, scale=scale, dtype=result, forms=["sm90-transposed"])
            for weight, (n, m), dim in product(wide, PATTERNS, (0, 1)):
                yield weight, Pruning("magnitude", n, m, dim, dtype=half)
                yield weight, Pruning("soft-threshold", n, m, dim, scale=scale, dtype=dtype, forms=both)
        case "mvue":
            for (n, m, estimator), x in product(
                ((2, 4, "exact"), (2, 4, "approx"), (1, 2, "exact")), (numbers(66, 70), numbers(5, 7), numbers(63, 129))
            ):
                yield x, key, n, m, 0, estimator, "dense"
                yield x, key, n, m, 1, estimator, "transposed"
            yield numbers(2, 7, 12), key, 2, 4, 1, "exact", "dense"
            yield from ((x, key, 2, 4, 1, "exact", "dense") for x in (special, numbers(0, 4)))
            for x in wide if dtype != torch.float32 else ():
                yield x, key, 2, 4, 0, "exact", "sm90-transposed"
                yield x, key, 2, 4, 1, "exact", "sm90"
            for estimator, x in product(
                ("exact", "approx") if dtype == torch.float32 else (), (special[:64, :32], numbers(96, 70))
            ):
                yield x, key, 2, 4, 0, estimator, "packed-transposed"
                yield x[:, :64], key, 2, 4, 1, estimator, "packed"
        case "masked_decay_":
            for weight, as_bits in product(weights, (False, True)):
                mask = reference.masks.nm_mask(weight, 2, 4, 1, as_bits)
                yield numbers(*weight.shape, seed=1.0), weight, mask, 0.3
        case "gated_activation" | "gated_activation_backward":
            for kind, rows in product(("swiglu", "geglu", "geglu-exact"), (65, 0)):
                grad, gate, up = (numbers(rows, 72, seed=seed) for seed in (1.0, 2.0, 3.0))
                column = up.t().contiguous().t()
                for tensors in ((grad, 20 * gate, up), (grad, gate, column)):
                    yield *tensors[operator == "gated_activation" :], kind
        case "unpack_nm":
            for rows, k in ((68, 72), (33, 192), (0, 64)):
                yield from packed(rows, k)
            yield special[:68, :36].contiguous(), next(packed(68, 72))[1], None, 4
        case "packed_mm":
            for rows, k, n in ((66, 96, 40), (33, 1056, 300), (130, 64, 600)):
                yield *reference.packed.pack_nm(numbers(rows, k), 2, 4), numbers(k, n, seed=1.0)
        case "packed_linear":
            for i, (rows, k, tokens) in enumerate(
                ((66, 136, 1), (33, 1056, 3), (66, 160, 17), (70, 192, 70), (0, 64, 2), (8, 8, 0))
            ):
                for stored in islice(packed(rows, k), 1 if device.type == "cuda" else None):  # no others have kernels
                    yield numbers(tokens, k, seed=1.0), *stored, numbers(rows, seed=3.0) if i % 2 else None


def _bounds(operator: str, wide: tuple) -> list[Tensor]:
    """How much further from the truth than the reference's each result of an inexact operator may be."""
    match operator:
        case "gated_activation" | "gated_activation_backward":  # differences, of terms of these sizes
            *grad, gate, up, _ = wide
            return [4 * UNIT * x.abs() + 1e-37 for x in ([grad[0] * up, grad[0] * gate] if grad else [gate * up])]
        case "packed_mm":
            values, mask, dense = wide
            return [(4 + len(dense)) * UNIT * reference.packed.packed_mm(values.abs(), mask, dense.abs()) + 1e-37]
        case "packed_linear":
            x, values, mask, scales, m, bias = wide
            weight = reference.packed.unpack_nm(values, mask, scales, m).abs()
            sizes = linear(x.abs(), weight, None if bias is None else bias.abs())
            bound = (4 + x.shape[1]) * UNIT * sizes + 1e-37
            if scales is not None:
                bound += sizes * 2**-8  # half a unit of bf16, to which some paths round the weight
                if len(x) <= 8:  # and half a step of x in 8 bits
                    bound += x.abs().amax(1, keepdim=True) / 254 * 1.001 * weight.sum(1)
            return [bound]
    raise ValueError(operator)
