"""Cases of gated activations and FP8: layouts and mixtures of them, every dtype, special values."""

from collections.abc import Callable, Iterator
from itertools import product

import torch
from cases import DTYPES, INF, NAN, Case, draw
from torch import Tensor

KINDS = ("swiglu", "geglu", "geglu-exact")
FORMATS = ("e4m3", "e5m2")
SPECIAL = (0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, -1e-38, 1e38, -INF, NAN)  # from 1.7e38 on, PyTorch's GELU overflows

# Each makes a tensor of a shape whose last two dimensions are the two sizes, in a layout of its own.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda x: x.contiguous(),
    "column": lambda x: x.flatten(0, -2).t().contiguous().t().view(x.shape),
    # One half of a fused projection, in its two layouts.
    "half": lambda x: torch.cat([x, x + 1], -1)[..., : x.shape[-1]],
    "column-half": lambda x: torch.cat([x.t(), x.t() + 1])[: x.shape[1]].t(),
    "every-second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "offset": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),  # not aligned
    "expanded": lambda x: x[..., :1].expand(x.shape),  # as the gradient of a sum over the last dimension
}
MIXTURES = (  # of grad, gate, up
    ("row", "row", "row"),
    ("column", "column", "column"),
    ("row", "half", "half"),
    ("row", "column", "row"),
    ("column", "column-half", "row"),
    ("expanded", "row", "every-second"),
    ("offset", "offset", "offset"),
)
# Rows and columns that do not fill a tile, straddle its border, or are none at all; the last exceeds a flat block.
SHAPES = ((1, 8), (5, 7), (63, 65), (123, 72), (64, 128), (1, 1), (0, 8), (8, 0), (66, 136))


def cases() -> Iterator[Case]:
    """Every case, small enough for the interpreter."""
    yield from _gated_cases()
    yield from _fp8_cases()


def _gated(name: str, kind: str, tensors: Callable[[torch.device], list[Tensor]]) -> Iterator[Case]:
    """Forward and backward from grad, gate and up."""
    yield Case(
        "gated.gated_activation",
        f"{kind}-{name}",
        lambda device: (*tensors(device)[1:], kind),
        exact=False,
        terms=lambda gate, up, _: [gate * up],
    )
    yield Case(
        "gated.gated_activation_backward",
        f"{kind}-{name}",
        lambda device: (*tensors(device), kind),
        exact=False,
        terms=lambda grad, gate, up, _: [grad * up, grad * gate],
    )


def _gated_cases() -> Iterator[Case]:
    for (i, shape), (j, mixture) in product(enumerate(SHAPES), enumerate(MIXTURES)):
        dtype = DTYPES[(i + j) % 3]
        yield from _gated(
            _label(shape, dtype, *mixture),
            KINDS[(i + 2 * j + j // 3) % 3],
            lambda device, s=shape, d=dtype, m=mixture: [LAYOUTS[x](y) for x, y in zip(m, _three(device, s, d))],
        )
    for kind, dtype in product(KINDS, DTYPES):
        yield from _gated(f"special-{dtype}", kind, lambda device, d=dtype: _every_three(device, SPECIAL, d))
        # Far into both tails, where exponentials overflow or vanish.
        wide = (-1e4, -120.0, -89.0, -40.0, -9.0, -5.0, -1.3, -0.75, 1e-4, 0.5, 3.0, 11.0, 88.0, 90.0, 1e4)
        yield from _gated(f"wide-{dtype}", kind, lambda device, d=dtype, w=wide: _every_three(device, w, d))
        yield from _gated(f"random-{dtype}", kind, lambda device, d=dtype: _three(device, (96, 256), d, 3.0))
    shapes = {
        "scalar": lambda x: x[0, 0],
        "vector": lambda x: x[:, 0],
        "3d": lambda x: x.view(2, 3, 11, 10)[:, 0],
        "3d-swapped": lambda x: x.view(6, 11, 10).transpose(0, 1),
        "3d-reversed": lambda x: x.view(6, 11, 10).permute(2, 1, 0),
    }
    for (i, (name, view)), other in product(enumerate(shapes.items()), ("same", "row")):
        change = (lambda x: x) if other == "same" else torch.Tensor.contiguous
        yield from _gated(
            f"{name}-{other}",
            KINDS[i % 3],
            lambda device, v=view, c=change: [
                c(v(x)) if j == 2 else v(x) for j, x in enumerate(_three(device, (66, 10), torch.bfloat16))
            ],
        )


def _fp8_cases() -> Iterator[Case]:
    for (i, shape), layout, format in product(enumerate(SHAPES), LAYOUTS, FORMATS):
        dtype = DTYPES[i % 3]
        make = lambda device, s=shape, d=dtype, x=layout, f=format: (LAYOUTS[x](draw(device, *s, dtype=d)), f)  # noqa: E731
        yield Case("fp8.fp8_quantize", _label(shape, dtype, layout, format), make)
        yield Case("fp8.fp8_simulate", _label(shape, dtype, layout, format), make)
    values = {
        "zeros": [0.0, -0.0, 0.0],
        "small": [1e-45, -1e-38, 3e-39, 0.0],
        "subnormal": [2.1712556154038473e-34, 1.294239261650401e-41],  # where a product with 1 / s rounds wrong
        "large": [3.4028234663852886e38, -3.4e38, 1.0, -1e-30],
        "ties": [448.0, 17.0, 19.0, -21.0, 2.0**-10, 3 * 2.0**-10, -(2.0**-10), -(2.0**-17)],
        "fp16": [6e4, -1e-7, 3e-8, -6e-8, 0.3],
    }
    for (name, x), dtype, format in product(values.items(), DTYPES, FORMATS):
        x = [min(max(v, torch.finfo(dtype).min), torch.finfo(dtype).max) for v in x]
        make = lambda device, x=x, d=dtype, f=format: (torch.tensor(x, dtype=d, device=device), f)  # noqa: E731
        yield Case("fp8.fp8_quantize", f"{name}-{dtype}-{format}", make)
        yield Case("fp8.fp8_simulate", f"{name}-{dtype}-{format}", make)
    for format, exponent in product(FORMATS, (-140, -105, -60, 0, 90, 126)):
        # Every value of fp16 in [1, 2), by scales from where they overflow to where they are subnormal.
        make = lambda device, e=exponent, f=format: (  # noqa: E731
            torch.arange(1024, 2048, device=device).float() * 2.0 ** (e - 10) * 0.7,
            f,
        )
        yield Case("fp8.fp8_quantize", f"exponent{exponent}-{format}", make)
        yield Case("fp8.fp8_simulate", f"exponent{exponent}-{format}", make)
    # Simulation of these raises in the reference; the scale and every value must say so.
    for bad, dtype, format in product(("nan", "-nan", "inf", "-inf", "both"), DTYPES, FORMATS):
        yield Case(
            "fp8.fp8_quantize",
            f"{bad}-{dtype}-{format}",
            lambda device, b=bad, d=dtype, f=format: (
                torch.tensor([1.0, -0.0, *(map(float, ("nan", "inf") if b == "both" else (b,))), 2.0]).to(device, d),
                f,
            ),
        )


def _three(device: torch.device, shape: tuple[int, int], dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    """grad, gate and up: Gaussian, all different, gate times `scale`."""
    grad, gate, up = draw(device, 3, *shape)
    return [grad.to(dtype), (scale * gate).to(dtype), up.to(dtype)]


def _every_three(device: torch.device, values: tuple[float, ...], dtype: torch.dtype) -> list[Tensor]:
    """Every three of the values, as grad, gate and up."""
    return [x.contiguous() for x in torch.tensor(list(product(values, repeat=3)), device=device).to(dtype).unbind(1)]


def _label(shape: tuple[int, int], dtype: torch.dtype, *more: str) -> str:
    return "-".join([f"{shape[0]}x{shape[1]}", str(dtype).removeprefix("torch."), *more])
