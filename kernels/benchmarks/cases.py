"""What every kernel must get right: one function of the two rooms, arguments, and how equal the results must be.

`reference` and `gpu` hold functions of the same names and arguments, so a case is a name and a way to make arguments.
The tests run all of them on CPU tensors in Triton's interpreter; `make gpu` runs them on the GPU, and again at the
sizes that are timed, before any speed is reported.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from sparse24_kernels import gpu, reference
from sparse24_kernels.cusparselt import Layout
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN, INF = float("nan"), float("inf")
SPECIAL = (0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, -1e-38, 3e38, -INF, NAN)
# Rows and columns that do not fill a tile, straddle its border, or are none at all.
SHAPES = ((1, 8), (3, 24), (5, 72), (63, 64), (66, 136), (123, 8), (0, 8), (8, 0))
SQUARE = tuple((4 * -(-rows // 4), columns) for rows, columns in SHAPES)


@dataclass(frozen=True)
class Case:
    """`function` is "file.name"; `arguments(device)` makes fresh ones, the same ones each time.

    Where the terms of a result cancel, no arithmetic is right to the last bit of what is left: `terms(*arguments)` has
    a tensor for each result, the size that errors are measured by.
    """

    function: str
    name: str
    arguments: Callable[[torch.device], tuple]
    exact: bool = True
    terms: Callable[..., list[Tensor]] | None = None

    def __str__(self) -> str:
        return f"{self.function}-{self.name}"


def check(case: Case, device: torch.device) -> None:
    """Run a case in both rooms and compare.

    Raises:
        AssertionError: the results differ, or a part of the kernel's result was never written.
    """
    expected = run(reference, case, device)
    with poisoned_memory():
        actual = run(gpu, case, device)
    assert len(actual) == len(expected), f"{case}: {len(actual)} results, the reference has {len(expected)}"
    truths = expected if case.exact else run(reference, case, device, torch.float64)
    sizes = truths if case.terms is None else case.terms(*converted(case.arguments(device), torch.float64))
    for ours, theirs, truth, size in zip(actual, expected, truths, sizes):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), f"{case}: {ours.shape} {ours.dtype}"
        if case.exact:
            assert_same_bits(ours, theirs, str(case))
        else:
            assert ours.stride() == theirs.stride(), f"{case}: strides {ours.stride()}, not {theirs.stride()}"
            assert_no_worse(ours, theirs, truth, size, str(case))


def run(room, case: Case, device: torch.device, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The results of a case, or what it has changed in place; with `dtype`, from its arguments in that precision."""
    file, name = case.function.split(".")
    arguments = case.arguments(device)
    if dtype is not None:
        arguments = converted(arguments, dtype)
    results = getattr(getattr(room, file), name)(*arguments)
    if results is None:
        results = arguments[0]
    return [results] if isinstance(results, Tensor) else list(results)


def converted(x, dtype: torch.dtype):
    """`x`, or every tensor in it, in another floating dtype."""
    if isinstance(x, list | tuple):
        return type(x)(converted(item, dtype) for item in x)
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


class poisoned_memory:
    """torch fills fresh memory with NaN (integers: their largest value), so what is never written shows."""

    def __enter__(self):
        self.before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)

    def __exit__(self, *_):
        torch.use_deterministic_algorithms(self.before)


def assert_same_bits(ours: Tensor, theirs: Tensor, name: str) -> None:
    """Equal bit for bit, but any NaN is as good as any other."""
    if ours.is_floating_point():
        same_nan = ours.float().isnan() & theirs.float().isnan()
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()]
        same = (ours.contiguous().view(integer) == theirs.contiguous().view(integer)) | same_nan
    else:
        same = ours == theirs
    if not same.all():
        where = (~same).nonzero()[0].tolist()
        raise AssertionError(
            f"{name}: {int((~same).sum())} of {same.numel()} differ, first at {where}: "
            f"{ours[tuple(where)].item()}, the reference has {theirs[tuple(where)].item()}"
        )


def assert_no_worse(ours: Tensor, theirs: Tensor, truth: Tensor, size: Tensor, name: str) -> None:
    """Three-way: no further from the truth (fp64) than the reference in this dtype, give or take an error of fp32."""
    ours, theirs, truth = ours.double(), theirs.double(), truth.double()
    assert (ours.isfinite() == truth.isfinite()).all() or (ours.isnan() == theirs.isnan()).all(), f"{name}: NaN or inf"
    finite = truth.isfinite() & theirs.isfinite()
    rounding = torch.finfo(torch.float32).eps * torch.maximum(truth.abs(), size.abs()) * 4 + 1e-37
    worse = ((ours - truth).abs() > (theirs - truth).abs() + rounding)[finite]
    assert not worse.any(), f"{name}: {int(worse.sum())} of {worse.numel()} values are worse than the reference's"


def draw(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32, ties: bool = False) -> Tensor:
    """Gaussian values, or small integers (many ties and zeros); the same on every device."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    values = (
        torch.randint(-3, 4, shape, generator=generator).float() if ties else torch.randn(shape, generator=generator)
    )
    return values.to(device, dtype)


def special(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Every group of four of the special values, `[10000 / 16, 64]`."""
    return torch.tensor(list(product(SPECIAL, repeat=4)), dtype=dtype, device=device).view(-1, 64)


def tiles(device: torch.device, m: int, k: int) -> Layout:
    """A layout like a vendor's: tiles of 16 rows x 1 unit, rows 0, 8, 1, 9, ... in each, tiles along the rows first."""
    row, unit = torch.arange(m, device=device), torch.arange(k // 16, device=device)
    return Layout((row // 16 * (k // 16) * 16 + row % 8 * 2 + row // 8 % 2).int(), unit.int() * 16)


def label(shape, dtype, *more) -> str:
    return "-".join([f"{shape[0]}x{shape[1]}", str(dtype).removeprefix("torch."), *map(str, more)])
