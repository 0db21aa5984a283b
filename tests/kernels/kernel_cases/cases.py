"""Which cases there are. The functions that make arguments are those of the benchmarks too."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import sparse24_kernels as kernels
import torch
from sparse24_kernels import reference
from torch import Tensor

from . import BF16, DTYPES, FP16, FP32, INF, NAN, Case, draw, sized, table

# Rows and columns that do not fill a tile, straddle its border, or are none at all.
SHAPES = ((1, 8), (3, 24), (5, 72), (63, 64), (66, 136), (123, 8), (0, 8), (8, 0))
SQUARE = tuple((4 * -(-rows // 4), columns) for rows, columns in SHAPES)
ALL_SPECIAL = (625, 64)
MVUE_KINDS = ((2, 4, "exact"), (2, 4, "approx"), (1, 2, "exact"))


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
    return tuple(reference.prune.prune(weight, "magnitude", 2, 4, 1, None, None, dtype, ["packed"]))


def packed_linear(device, shape, dtype, tokens, bias=False):
    """Tokens of a layer whose weight is packed; the sums of their products have a variance of 1."""
    out, inputs = shape
    x, weight = draw(device, (tokens, inputs), dtype), packed_matrix(device, shape, dtype, inputs**-0.5)
    return x, *weight, draw(device, (out,), dtype) if bias else None


def packed_terms(x, values, indices, bias):
    """The sums of the magnitudes."""
    return [reference.packed.packed_linear(x.abs(), values.abs(), indices, None if bias is None else bias.abs())]


def mvue(device, shape, dtype, kind, key, n, m, estimator, dim, form):
    key = torch.full((), key, device=device, dtype=torch.int64)
    return draw(device, shape, dtype, kind), key, n, m, dim, estimator, form


def _prune_rows() -> Iterator[tuple]:
    for (shape, dtype), dim in product(sized(SQUARE), (0, 1)):
        packed = ["packed"] if dim == 1 and shape[1] % 8 == 0 else []  # bytes of two groups
        yield shape, dtype, "random", "magnitude", dim, dtype, ["dense"]
        yield shape, dtype, "random", "magnitude", dim, BF16, ["dense", *packed]
        yield shape, dtype, "random", "soft-threshold", dim, FP16, ["dense", "transposed"]
        yield shape, dtype, "random", "soft-threshold", dim, FP32, packed or ["transposed"]
        yield shape, dtype, "random", "any mask", dim, dtype, ["transposed", "dense"]
        yield shape, dtype, "random", "mask", 1, BF16, ["dense", "transposed", "packed"]
    for dtype in DTYPES:
        for rule, form in product(("magnitude", "soft-threshold"), ("dense", "packed")):
            yield ALL_SPECIAL, dtype, "special", rule, 1, dtype, [form]
        yield (64, 72), dtype, "random", "any mask", 1, dtype, ["packed"]


def _mvue_rows() -> Iterator[tuple]:
    shapes = sized(((1, 8), (5, 7), (63, 65), (70, 130), (2, 3), (0, 4), (4, 0)))
    for of, kind, dim, form in product(shapes, MVUE_KINDS, (0, 1), ("dense", "transposed")):
        yield *of, "random", -(2**62) + 12345, *kind, dim, form
    for dtype in (FP32, BF16):
        yield from ((ALL_SPECIAL, dtype, "special", 3, *kind, 1, "dense") for kind in MVUE_KINDS)
    yield (2, 7, 12), FP32, "random", 5, *MVUE_KINDS[0], 1, "dense"


KINDS = ("swiglu", "geglu", "geglu-exact")
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
OF_MATRICES, VIEWS = list(LAYOUTS)[:7], list(LAYOUTS)[7:]
MIXTURES = ["row row row", "column column column", "row half half", "row column row", "column column-half row"]
MIXTURES += ["expanded row every-second", "offset offset offset"]  # of grad, gate, up
# The last exceeds a flat block.
ANY_SHAPES = ((1, 8), (5, 7), (63, 65), (123, 72), (64, 128), (1, 1), (0, 8), (8, 0), (66, 136))


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


def all_cases() -> Iterator[Case]:
    """Every case, each small enough for the interpreter."""
    rows: list[tuple] = [(*of, "ties", 1, packed) for of, packed in product(sized(SHAPES), (False, True))]
    rows += [(*of, "random", 0, packed) for of, packed in product(sized(SQUARE), (False, True))]
    rows += [(ALL_SPECIAL, dtype, "special", 1, True) for dtype in DTYPES]
    yield from table("masks.nm_mask", on_weight, [*rows, ((2, 8, 12), FP32, "random", 1, True)])
    yield Case("masks.nm_mask", "strided", lambda device: (draw(device, (16, 12)).t(), 2, 4, 0, True))
    kinds = product(sized(SQUARE), ("ties", "random"), (False, True))
    rows = [(*of, kind, "exact", packed) for of, kind, packed in kinds]
    rows += [((64, 64), dtype, "special", "exact", True) for dtype in DTYPES]
    yield from table("transposable.transposable_mask", on_weight, rows)
    rows = [(*of, "random", dim, ("mse", "l1")[dim]) for of, dim in product(sized(SQUARE), (0, 1))]
    yield from table("prune.s_ste_scale", on_weight, rows, exact=False)
    yield from table("packed.unpack_nm", packed_matrix, [((3, 24), FP32), ((66, 136), BF16), ((0, 8), FP16)])
    # Tails of every block, K in one part and in several, more tokens than one pass takes.
    sizes = (
        (3, 24, 1),
        (66, 136, 3),
        (33, 1032, 1),
        (40, 2072, 17),
        (130, 264, 70),
        (8, 1536, 64),
        (0, 8, 2),
        (8, 8, 0),
    )
    rows = [
        ((out, inputs), dtype, tokens, i % 2 == 0) for i, (out, inputs, tokens) in enumerate(sizes) for dtype in DTYPES
    ]
    yield from table("packed.packed_linear", packed_linear, rows, exact=False, terms=packed_terms)
    yield from table("prune.prune", prune, _prune_rows())
    yield from table("mvue.mvue", mvue, _mvue_rows())
    for count, (function, fields) in enumerate(GATED.items(), 2):
        rows = []
        for (i, shape), (j, mixture) in product(enumerate(ANY_SHAPES), enumerate(MIXTURES)):
            rows.append((shape, DTYPES[(i + j) % 3], count, KINDS[(i + 2 * j + j // 3) % 3], mixture))
        for (i, view), up in product(enumerate(VIEWS), ("", "+row")):
            rows.append(((66, 10), BF16, count, KINDS[i % 3], f"{view} {view} {view}{up}"))
        rows += [(*of, count, kind, MIXTURES[0]) for *of, kind in product([(96, 256), *VALUES], DTYPES, KINDS)]
        yield from table(function, gated, rows, exact=False, **fields)
