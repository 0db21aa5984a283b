"""Correctness cases of the kernels: a function, its arguments, and how equal results must be to the reference's.

`reference`, `gpu` and `cpu` hold functions of the same names and arguments. The tests run every case on CPU tensors,
those of `gpu` in Triton's interpreter. The benchmarks run them on the GPU, and again at the sizes that they time,
before they report a speed.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, product
from types import ModuleType
from typing import Any

import torch
from sparse24_kernels import gpu, reference
from torch import Tensor
from torch.utils._pytree import tree_map_only

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


def run(package: ModuleType, function: str, arguments: tuple) -> list[Tensor]:
    """What the function of a package returns, or changes in place."""
    module, name = function.split(".")
    results = getattr(getattr(package, module), name)(*arguments)
    if results is None:
        results = arguments[0]
    return [results] if isinstance(results, Tensor) else list(results)


def assert_same_bits(ours: Tensor, theirs: Tensor, name: str) -> None:
    """Equal bit for bit, except that any NaN equals any other."""
    same = ours == theirs
    if ours.is_floating_point():
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.element_size()]
        same = ours.contiguous().view(integer) == theirs.contiguous().view(integer)
        same |= ours.float().isnan() & theirs.float().isnan()
    if not same.all():
        i = tuple((~same).nonzero()[0].tolist())
        first = f"first at {list(i)}: {ours[i].item()}, the reference has {theirs[i].item()}"
        raise AssertionError(f"{name}: {int((~same).sum())} of {same.numel()} differ, {first}")


def assert_no_worse(ours: Tensor, theirs: Tensor, truth: Tensor, size: Tensor, name: str) -> None:
    """No further from the truth (fp64) than the reference in this dtype is, plus four units of fp32."""
    ours, theirs, truth = ours.double(), theirs.double(), truth.double()
    assert (ours.isfinite() == truth.isfinite()).all() or (ours.isnan() == theirs.isnan()).all(), f"{name}: NaN or inf"
    finite = truth.isfinite() & theirs.isfinite()
    rounding = torch.finfo(torch.float32).eps * torch.maximum(truth.abs(), size.abs()) * 4 + 1e-37
    worse = ((ours - truth).abs() > (theirs - truth).abs() + rounding)[finite]
    assert not worse.any(), f"{name}: {int(worse.sum())} of {worse.numel()} values are worse than the reference's"


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
