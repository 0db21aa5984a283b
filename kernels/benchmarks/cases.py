"""What every kernel must get right: one function of the two rooms, arguments, and how equal the results must be.

`reference` and `gpu` hold functions of the same names and arguments, so a case is a name and a way to make arguments.
The tests run all of them on CPU tensors in Triton's interpreter; `make gpu` runs them on the GPU, and again at the
sizes that are timed, before any speed is reported.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from sparse24_kernels import gpu, reference
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN, INF = float("nan"), float("inf")
SPECIAL = (0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, -1e-38, 3e38, -INF, NAN)
# Rows and columns that do not fill a tile, straddle its border, or are none at all.
SHAPES = ((1, 8), (3, 24), (5, 72), (63, 64), (66, 136), (123, 8), (0, 8), (8, 0))
SQUARE = tuple((4 * -(-rows // 4), columns) for rows, columns in SHAPES)


@dataclass(frozen=True)
class Case:
    """`function` is "file.name"; `arguments(device)` makes fresh ones, the same ones each time."""

    function: str
    name: str
    arguments: Callable[[torch.device], tuple]
    exact: bool = True

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
    for ours, theirs, truth in zip(actual, expected, truths):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), f"{case}: {ours.shape} {ours.dtype}"
        if case.exact:
            assert_same_bits(ours, theirs, str(case))
        else:
            assert ours.stride() == theirs.stride(), f"{case}: strides {ours.stride()}, not {theirs.stride()}"
            assert_no_worse(ours, theirs, truth, str(case))


def run(room, case: Case, device: torch.device, dtype: torch.dtype | None = None) -> list[Tensor]:
    """The results of a case, or what it has changed in place; with `dtype`, from its arguments in that precision."""
    file, name = case.function.split(".")
    arguments = case.arguments(device)
    if dtype is not None:
        arguments = tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments)
    results = getattr(getattr(room, file), name)(*arguments)
    if results is None:
        results = arguments[0]
    return [results] if isinstance(results, Tensor) else list(results)


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


def assert_no_worse(ours: Tensor, theirs: Tensor, truth: Tensor, name: str) -> None:
    """Three-way: no further from the truth (fp64) than the reference in this dtype, give or take one rounding."""
    ours, theirs, truth = ours.double(), theirs.double(), truth.double()
    assert (ours.isfinite() == truth.isfinite()).all() or (ours.isnan() == theirs.isnan()).all(), f"{name}: NaN or inf"
    finite = truth.isfinite() & theirs.isfinite()
    rounding = torch.finfo(torch.float32).eps * truth.abs() * 4 + 1e-37
    worse = ((ours - truth).abs() > (theirs - truth).abs() + rounding)[finite]
    assert not worse.any(), f"{name}: {int(worse.sum())} of {worse.numel()} values are worse than the reference's"


def draw(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32, ties: bool = False) -> Tensor:
    """Gaussian values, or small integers (many ties and zeros); the same on every device."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    values = torch.randint(-3, 4, shape, generator=generator).float() if ties else torch.randn(shape, generator=generator)
    return values.to(device, dtype)


def special(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Every group of four of the special values, `[10000 / 16, 64]`."""
    return torch.tensor(list(product(SPECIAL, repeat=4)), dtype=dtype, device=device).view(-1, 64)[:, :]


def all_cases() -> Iterator[Case]:
    """Every case, small enough for the interpreter."""
    yield from _mask_cases()
    yield from _prune_cases()
    yield from _mvue_cases()
    yield from _model_cases()


def _label(shape, dtype, *more) -> str:
    return "-".join([f"{shape[0]}x{shape[1]}", str(dtype).removeprefix("torch."), *map(str, more)])


def _mask_cases() -> Iterator[Case]:
    for i, shape in enumerate(SHAPES):
        dtype = DTYPES[i % 3]
        for packed in (False, True):
            yield Case(
                "masks.nm_mask",
                _label(shape, dtype, "rows", packed),
                lambda device, s=shape, d=dtype, p=packed: (draw(device, *s, dtype=d, ties=True), 2, 4, 1, p),
            )
    for i, shape in enumerate(SQUARE):
        dtype = DTYPES[i % 3]
        for packed in (False, True):
            yield Case(
                "masks.nm_mask",
                _label(shape, dtype, "columns", packed),
                lambda device, s=shape, d=dtype, p=packed: (draw(device, *s, dtype=d), 2, 4, 0, p),
            )
            for ties in (False, True):
                yield Case(
                    "transposable.transposable_mask",
                    _label(shape, dtype, packed, "ties" if ties else "random"),
                    lambda device, s=shape, d=dtype, p=packed, t=ties: (
                        draw(device, *s, dtype=d, ties=t), 2, 4, "exact", p
                    ),
                )
    for dtype in DTYPES:
        yield Case("masks.nm_mask", f"special-{dtype}", lambda device, d=dtype: (special(device, d), 2, 4, 1, True))
        yield Case(
            "transposable.transposable_mask",
            f"special-{dtype}",
            lambda device, d=dtype: (special(device, d)[:64], 2, 4, "exact", True),
        )
    yield Case("masks.nm_mask", "3d", lambda device: (draw(device, 2, 8, 12), 2, 4, 1, True))
    yield Case("masks.nm_mask", "strided", lambda device: (draw(device, 16, 12).t(), 2, 4, 0, True))


PRUNE = {
    "dense": (["dense"], torch.bfloat16),
    "both": (["dense", "transposed"], torch.float16),
    "transposed": (["transposed"], torch.float32),
}


def _prune_cases() -> Iterator[Case]:
    for (i, shape), dim in product(enumerate(SQUARE), (0, 1)):
        dtype = DTYPES[i % 3]
        mask = lambda device, s=shape: draw(device, *s, ties=True) > 0  # noqa: E731
        packed = "packed" if dim else "packed-transposed"
        fits = shape[dim] % 8 == 0
        for rule, forms, out in (
            ("magnitude", ["dense"], dtype),
            ("magnitude", ["dense", packed] if fits else ["dense"], torch.bfloat16),
            ("soft-threshold", ["dense", "transposed"], torch.float16),
            ("soft-threshold", [packed] if fits else ["transposed"], torch.float32),
            ("soft-threshold", ["dense"], torch.float8_e4m3fn),
            ("mask", ["transposed", "dense"], dtype),
        ):
            scale = (lambda device: torch.tensor(1.483, device=device)) if rule == "soft-threshold" else (lambda _: None)
            yield Case(
                "prune.prune",
                _label(shape, dtype, rule, *forms, f"dim{dim}", out),
                lambda device, s=shape, d=dtype, r=rule, f=forms, o=out, sc=scale, m=mask, dim=dim: (
                    draw(device, *s, dtype=d), r, 2, 4, dim, m(device) if r == "mask" else None, sc(device), o, f
                ),
            )
        if shape[0] % 8 == 0:
            forms = ["dense", "transposed", "packed", "packed-transposed"]
            yield Case(
                "prune.prune",
                _label(shape, dtype, "transposable", *forms),
                lambda device, s=shape, d=dtype, f=forms: (
                    (w := draw(device, *s, dtype=d)), "mask", 2, 4, 1,
                    reference.transposable.transposable_mask(w, 2, 4, "exact", True), None, torch.bfloat16, f,
                ),
            )
        yield Case(
            "prune.s_ste_scale",
            _label(shape, dtype, f"dim{dim}"),
            lambda device, s=shape, d=dtype, dim=dim: (draw(device, *s, dtype=d), 2, 4, dim, ("mse", "l1")[dim]),
            exact=False,
        )
    for dtype in DTYPES:
        for rule in ("magnitude", "soft-threshold"):
            yield Case(
                "prune.prune",
                f"special-{rule}-{dtype}",
                lambda device, d=dtype, r=rule: (special(device, d), r, 2, 4, 1, None, None, d, ["dense"]),
            )
    for shape, dtype in (((3, 24), torch.float32), ((66, 136), torch.bfloat16), ((0, 8), torch.float16)):
        yield Case(
            "prune.unpack_nm",
            _label(shape, dtype),
            lambda device, s=shape, d=dtype: tuple(
                reference.prune.prune(draw(device, *s, dtype=d), "magnitude", 2, 4, 1, None, None, d, ["packed"])
            ),
        )


def _mvue_cases() -> Iterator[Case]:
    kinds = ((2, 4, "exact"), (2, 4, "approx"), (1, 2, "exact"))
    shapes = ((1, 8), (5, 7), (63, 65), (70, 130), (2, 3), (0, 4), (4, 0))
    for (i, shape), dim, kind, form in product(enumerate(shapes), (0, 1), kinds, ("dense", "transposed")):
        dtype = DTYPES[i % 3]
        yield Case(
            "mvue.mvue",
            _label(shape, dtype, *kind, f"dim{dim}", form),
            lambda device, s=shape, d=dtype, dim=dim, k=kind, f=form: (
                draw(device, *s, dtype=d), torch.tensor(-(2**62) + 12345, device=device), *k, dim, f
            ),
        )
    for shape, dim, estimator in product(((8, 16), (72, 136)), (0, 1), ("exact", "approx")):
        yield Case(
            "mvue.mvue",
            _label(shape, torch.float32, estimator, f"dim{dim}", "packed"),
            lambda device, s=shape, dim=dim, e=estimator: (
                draw(device, *s, ties=True), torch.tensor(7, device=device), 2, 4, e and 4 and dim, e, "packed"
            ) if False else (draw(device, *s, ties=True), torch.tensor(7, device=device), 2, 4, dim, e, "packed"),
        )
    for kind, dtype in product(kinds, (torch.float32, torch.bfloat16)):
        yield Case(
            "mvue.mvue",
            f"special-{kind}-{dtype}",
            lambda device, k=kind, d=dtype: (special(device, d), torch.tensor(3, device=device), *k, 1, "dense"),
        )
    yield Case(
        "mvue.mvue", "3d", lambda device: (draw(device, 2, 7, 12), torch.tensor(5, device=device), 2, 4, "exact", 1)[:2]
        + (2, 4, 1, "exact", "dense"),
    )


def _model_cases() -> Iterator[Case]:
    """Lists of tensors: aligned ones take one launch, the others the reference."""
    shapes = ((64, 64), (128, 96), (12, 8), (5, 12), (1, 4))
    for packed, dtype in product((False, True), DTYPES):
        yield Case(
            "decay.masked_decay_",
            f"packed{packed}-{dtype}",
            lambda device, p=packed, d=dtype: (
                [draw(device, *s, dtype=d) for s in shapes],
                [draw(device, *s) + 1 for s in shapes],
                [reference.masks.nm_mask(draw(device, *s), 2, 4, 1, p) for s in shapes],
                [6e-5 * (i + 1) for i in range(len(shapes))],
            ),
        )
    yield Case(
        "masks.count_flips",
        "model",
        lambda device: tuple(
            [reference.masks.nm_mask(draw(device, *s, ties=ties), 2, 4, 1, True) for s in shapes] for ties in (False, True)
        ),
    )
