"""Cases of masks, pruning, MVUE, decay and flips: awkward shapes, every dtype, ties and special values."""

from collections.abc import Iterator
from itertools import product

import torch
from cases import DTYPES, SHAPES, SQUARE, Case, draw, label, special, tiles
from sparse24_kernels import reference


def cases() -> Iterator[Case]:
    """Every case, small enough for the interpreter."""
    yield from _mask_cases()
    yield from _prune_cases()
    yield from _mvue_cases()
    yield from _compressed_cases()
    yield from _model_cases()


def _mask_cases() -> Iterator[Case]:
    for i, shape in enumerate(SHAPES):
        dtype = DTYPES[i % 3]
        for packed in (False, True):
            yield Case(
                "masks.nm_mask",
                label(shape, dtype, "rows", packed),
                lambda device, s=shape, d=dtype, p=packed: (draw(device, *s, dtype=d, ties=True), 2, 4, 1, p),
            )
    for i, shape in enumerate(SQUARE):
        dtype = DTYPES[i % 3]
        for packed in (False, True):
            yield Case(
                "masks.nm_mask",
                label(shape, dtype, "columns", packed),
                lambda device, s=shape, d=dtype, p=packed: (draw(device, *s, dtype=d), 2, 4, 0, p),
            )
            for ties in (False, True):
                yield Case(
                    "transposable.transposable_mask",
                    label(shape, dtype, packed, "ties" if ties else "random"),
                    lambda device, s=shape, d=dtype, p=packed, t=ties: (
                        draw(device, *s, dtype=d, ties=t),
                        2,
                        4,
                        "exact",
                        p,
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
            scale = (
                (lambda device: torch.tensor(1.483, device=device)) if rule == "soft-threshold" else (lambda _: None)
            )
            yield Case(
                "prune.prune",
                label(shape, dtype, rule, *forms, f"dim{dim}", out),
                lambda device, s=shape, d=dtype, r=rule, f=forms, o=out, sc=scale, m=mask, dim=dim: (
                    draw(device, *s, dtype=d),
                    r,
                    2,
                    4,
                    dim,
                    m(device) if r == "mask" else None,
                    sc(device),
                    o,
                    f,
                ),
            )
        if shape[0] % 8 == 0:
            forms = ["dense", "transposed", "packed", "packed-transposed"]
            yield Case(
                "prune.prune",
                label(shape, dtype, "transposable", *forms),
                lambda device, s=shape, d=dtype, f=forms: (
                    (w := draw(device, *s, dtype=d)),
                    "mask",
                    2,
                    4,
                    1,
                    reference.transposable.transposable_mask(w, 2, 4, "exact", True),
                    None,
                    torch.bfloat16,
                    f,
                ),
            )
        yield Case(
            "prune.s_ste_scale",
            label(shape, dtype, f"dim{dim}"),
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
            # What a packed form stores of groups with NaN and inf, and of masks that keep any number of four.
            yield Case(
                "prune.prune",
                f"special-packed-{rule}-{dtype}",
                lambda device, d=dtype, r=rule: (special(device, d), r, 2, 4, 1, None, None, d, ["packed"]),
            )
        yield Case(
            "prune.prune",
            f"any-mask-{dtype}",
            lambda device, d=dtype: (
                draw(device, 64, 72, dtype=d),
                "mask",
                2,
                4,
                1,
                draw(device, 64, 72, ties=True) > 0,
                None,
                d,
                ["packed", "packed-transposed"],
            ),
        )
    for shape, dtype in (((3, 24), torch.float32), ((66, 136), torch.bfloat16), ((0, 8), torch.float16)):
        yield Case(
            "prune.unpack_nm",
            label(shape, dtype),
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
            label(shape, dtype, *kind, f"dim{dim}", form),
            lambda device, s=shape, d=dtype, dim=dim, k=kind, f=form: (
                draw(device, *s, dtype=d),
                torch.tensor(-(2**62) + 12345, device=device),
                *k[:2],
                dim,
                k[2],
                f,
            ),
        )
    for shape, dim, estimator in product(((8, 16), (72, 136)), (0, 1), ("exact", "approx")):
        yield Case(
            "mvue.mvue",
            label(shape, torch.float32, estimator, f"dim{dim}", "packed"),
            lambda device, s=shape, dim=dim, e=estimator: (
                draw(device, *s, ties=True),
                torch.tensor(7, device=device),
                2,
                4,
                dim,
                e,
                "packed",
            ),
        )
    for dim, dtype in product((0, 1), (torch.float32, torch.bfloat16)):
        yield Case(
            "mvue.mvue",
            f"special-packed-dim{dim}-{dtype}",
            lambda device, dim=dim, d=dtype: (
                special(device, d)[:624],
                torch.tensor(3, device=device),
                2,
                4,
                dim,
                "exact",
                "packed",
            ),
        )
    for kind, dtype in product(kinds, (torch.float32, torch.bfloat16)):
        yield Case(
            "mvue.mvue",
            f"special-{kind}-{dtype}",
            lambda device, k=kind, d=dtype: (
                special(device, d),
                torch.tensor(3, device=device),
                *k[:2],
                1,
                k[2],
                "dense",
            ),
        )
    yield Case(
        "mvue.mvue",
        "3d",
        lambda device: (draw(device, 2, 7, 12), torch.tensor(5, device=device), 2, 4, 1, "exact", "dense"),
    )


def _compressed_cases() -> Iterator[Case]:
    """Indices in units of 16 bits where a layout puts them; every size a multiple of 16."""
    for (i, shape), dim in product(enumerate(((16, 16), (48, 272), (80, 144), (128, 64))), (0, 1)):
        dtype, out = DTYPES[i % 3], (torch.bfloat16, torch.float16)[i % 2]
        form = ("compressed-transposed", "compressed")[dim]
        layouts = lambda device, s=shape: {  # noqa: E731
            "compressed": tiles(device, *s),
            "compressed-transposed": tiles(device, *s[::-1]),
        }
        for rule, forms in (
            ("magnitude", [form]),
            ("soft-threshold", ["dense", form]),
            ("mask", ["compressed", "compressed-transposed", "transposed"]),
            ("mask", [form, "packed-transposed" if dim else "packed"]),
        ):
            yield Case(
                "prune.prune",
                label(shape, dtype, rule, *forms, f"dim{dim}", out),
                lambda device, s=shape, d=dtype, r=rule, f=forms, o=out, layouts=layouts, dim=dim: (
                    (w := draw(device, *s, dtype=d)),
                    r,
                    2,
                    4,
                    dim,
                    reference.transposable.transposable_mask(w, 2, 4, "exact", True) if r == "mask" else None,
                    None,
                    o,
                    f,
                    {form: layout for form, layout in layouts(device).items() if form in f},
                ),
            )
        for estimator in ("exact", "approx"):
            yield Case(
                "mvue.mvue",
                label(shape, out, estimator, f"dim{dim}", "compressed"),
                lambda device, s=shape, d=out, dim=dim, e=estimator, layouts=layouts, f=form: (
                    draw(device, *s, dtype=d),
                    torch.tensor(7, device=device),
                    2,
                    4,
                    dim,
                    e,
                    "compressed",
                    layouts(device)[f],
                ),
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
            exact=False,
        )
    yield Case(
        "masks.count_flips",
        "model",
        lambda device: tuple(
            [reference.masks.nm_mask(draw(device, *s, ties=ties), 2, 4, 1, True) for s in shapes]
            for ties in (False, True)
        ),
    )
