"""Correctness cases of the kernels, each small enough for Triton's interpreter, and how results are compared.

The tests run them on CPU tensors, those of `gpu` in Triton's interpreter; `pytest -m gpu` runs them on a GPU, and at
the sizes that the benchmarks time.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, product
from types import ModuleType
from typing import Any

import torch
from sparse24_kernels import gpu, reference
from sparse24_kernels.hard_problems import difference
from torch import Tensor
from torch.utils._pytree import tree_map_only

from recipes.benchmarks import cases
from recipes.benchmarks.cases import BF16, DTYPES, FP16, FP32, LAYOUTS, MVUE_KINDS, Case, Shape, draw, run

# Rows and columns that do not fill a tile, straddle its border, or are none at all.
SHAPES = ((1, 8), (3, 24), (5, 72), (63, 64), (66, 136), (123, 8), (0, 8), (8, 0))
SQUARE = tuple((4 * -(-rows // 4), columns) for rows, columns in SHAPES)
ALL_SPECIAL = (625, 64)
KINDS = ("swiglu", "geglu", "geglu-exact")
OF_MATRICES, VIEWS = list(LAYOUTS)[:7], list(LAYOUTS)[7:]
MIXTURES = ["row row row", "column column column", "row half half", "row column row", "column column-half row"]
MIXTURES += ["expanded row every-second", "offset offset offset"]  # of grad, gate, up
# The last exceeds a flat block.
ANY_SHAPES = ((1, 8), (5, 7), (63, 65), (123, 72), (64, 128), (1, 1), (0, 8), (8, 0), (66, 136))


def table(function: str, make: Callable[..., tuple], rows: Iterable[tuple], **fields: Any) -> Iterator[Case]:
    """A case per different row, named after it: `((3, 24), torch.bfloat16)` is "3-24-bfloat16"."""
    for name, row in {re.sub(r"(torch\.|[^\w.-])+", "-", str(row)).strip("-"): row for row in rows}.items():
        yield Case(function, name, make, row, **fields)


def sized(shapes: Iterable[Shape]) -> list[tuple[Shape, torch.dtype]]:
    """Each shape with one dtype, in turn."""
    return list(zip(shapes, cycle(DTYPES)))


def check(case: Case, device: torch.device, package: ModuleType = gpu) -> None:
    """Run a case in a package and in the reference, and compare.

    Raises:
        AssertionError: the results differ, or a part of the kernel's result was never written.
    """

    def wide() -> tuple:
        return tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, case.arguments(device))

    expected = run(reference, case.function, case.arguments(device))
    # torch fills fresh memory with NaN (integers: their largest value), so memory that is never written shows.
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        actual = run(package, case.function, case.arguments(device))
    finally:
        torch.use_deterministic_algorithms(before)
    truths = expected if case.exact else run(reference, case.function, wide())
    sizes = case.terms(*wide()) if case.terms else truths
    for ours, theirs, truth, size in zip(actual, expected, truths, sizes, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), f"{case}: {ours.shape} {ours.dtype}"
        if case.exact:
            assert_same_bits(ours, theirs, str(case))
        else:
            assert ours.stride() == theirs.stride(), f"{case}: strides {ours.stride()}, not {theirs.stride()}"
            assert_no_worse(ours, theirs, truth, size, str(case))


def assert_same_bits(ours: Tensor, theirs: Tensor, name: str) -> None:
    """Equal bit for bit, except that any NaN equals any other."""
    different = difference(ours, theirs, theirs)
    assert not different, f"{name}: {different}"


def assert_no_worse(ours: Tensor, theirs: Tensor, truth: Tensor, size: Tensor, name: str) -> None:
    """No further from the truth (fp64) than the reference in this dtype is, plus four units of fp32."""
    ours, theirs, truth = ours.double(), theirs.double(), truth.double()
    assert (ours.isfinite() == truth.isfinite()).all() or (ours.isnan() == theirs.isnan()).all(), f"{name}: NaN or inf"
    finite = truth.isfinite() & theirs.isfinite()
    rounding = torch.finfo(torch.float32).eps * torch.maximum(truth.abs(), size.abs()) * 4 + 1e-37
    worse = ((ours - truth).abs() > (theirs - truth).abs() + rounding)[finite]
    assert not worse.any(), f"{name}: {int(worse.sum())} of {worse.numel()} values are worse than the reference's"


def _prune_rows() -> Iterator[tuple]:
    for (shape, dtype), dim in product(sized(SQUARE), (0, 1)):
        yield shape, dtype, "random", "magnitude", dim, dtype, ["dense"]
        yield shape, dtype, "random", "magnitude", dim, BF16, ["dense"]
        yield shape, dtype, "random", "soft-threshold", dim, FP16, ["dense", "transposed"]
        yield shape, dtype, "random", "soft-threshold", dim, FP32, ["transposed"]
        yield shape, dtype, "random", "any mask", dim, dtype, ["transposed", "dense"]
        yield shape, dtype, "random", "mask", 1, BF16, ["dense", "transposed"]
    for dtype, result in ((FP32, BF16), (BF16, BF16), (FP16, FP16)):
        for shape, kind in (((64, 192), "random"), ((128, 64), "ties")):
            yield shape, dtype, kind, "mask", 1, result, ["sm90", "sm90-transposed", "dense"]
            yield shape, dtype, kind, "magnitude", 1, result, ["sm90"]
            yield shape, dtype, kind, "soft-threshold", 0, result, ["transposed", "sm90-transposed"]
    for dtype in DTYPES:
        for rule in ("magnitude", "soft-threshold"):
            yield ALL_SPECIAL, dtype, "special", rule, 1, dtype, ["dense"]


def _mvue_rows() -> Iterator[tuple]:
    shapes = sized(((1, 8), (5, 7), (63, 65), (70, 130), (2, 3), (0, 4), (4, 0)))
    for of, kind, dim, form in product(shapes, MVUE_KINDS, (0, 1), ("dense", "transposed")):
        yield *of, "random", -(2**62) + 12345, *kind, dim, form
    for dtype, kind in product((BF16, FP16), (MVUE_KINDS[0], MVUE_KINDS[2])):
        yield (128, 192), dtype, "random", 11, *kind, 0, "sm90-transposed"
        yield (64, 128), dtype, "random", 12, *kind, 1, "sm90"
    for dtype in (FP32, BF16):
        yield from ((ALL_SPECIAL, dtype, "special", 3, *kind, 1, "dense") for kind in MVUE_KINDS)
    yield (2, 7, 12), FP32, "random", 5, *MVUE_KINDS[0], 1, "dense"


def all_cases() -> Iterator[Case]:
    """Every case, each small enough for the interpreter."""
    rows: list[tuple] = [(*of, "ties", 1, packed) for of, packed in product(sized(SHAPES), (False, True))]
    rows += [(*of, "random", 0, packed) for of, packed in product(sized(SQUARE), (False, True))]
    rows += [(ALL_SPECIAL, dtype, "special", 1, True) for dtype in DTYPES]
    yield from table("masks.nm_mask", cases.on_weight, [*rows, ((2, 8, 12), FP32, "random", 1, True)])
    yield Case("masks.nm_mask", "strided", lambda device: (draw(device, (16, 12)).t(), 2, 4, 0, True))
    kinds = product(sized(SQUARE), ("ties", "random"), (False, True))
    rows = [(*of, kind, "exact", packed) for of, kind, packed in kinds]
    rows += [((64, 64), dtype, "special", "exact", True) for dtype in DTYPES]
    yield from table("transposable.transposable_mask", cases.on_weight, rows)
    rows = [(*of, "random", dim, ("mse", "l1")[dim]) for of, dim in product(sized(SQUARE), (0, 1))]
    yield from table("prune.s_ste_scale", cases.on_weight, rows, exact=False)
    yield from table("packed.unpack_nm", cases.packed_matrix, [((3, 24), FP32), ((66, 136), BF16), ((0, 8), FP16)])
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
    yield from table("packed.packed_linear", cases.packed_linear, rows, exact=False, terms=cases.packed_terms)
    yield from table("prune.prune", cases.prune, _prune_rows())
    yield from table("mvue.mvue", cases.mvue, _mvue_rows())
    for count, (function, fields) in enumerate(cases.GATED.items(), 2):
        rows = []
        for (i, shape), (j, mixture) in product(enumerate(ANY_SHAPES), enumerate(MIXTURES)):
            rows.append((shape, DTYPES[(i + j) % 3], count, KINDS[(i + 2 * j + j // 3) % 3], mixture))
        for (i, view), up in product(enumerate(VIEWS), ("", "+row")):
            rows.append(((66, 10), BF16, count, KINDS[i % 3], f"{view} {view} {view}{up}"))
        rows += [(*of, count, kind, MIXTURES[0]) for *of, kind in product([(96, 256), *cases.VALUES], DTYPES, KINDS)]
        yield from table(function, cases.gated, rows, exact=False, **fields)
