"""Problems by which tests compare kernels with the reference: those of first use, at more shapes, and gated
activations in more memory layouts and of more values.

They are small enough for Triton's interpreter, in which the tests run the kernels of `gpu` on CPU tensors;
`pytest -m gpu` runs them on a GPU.
"""

from collections.abc import Callable, Iterator
from itertools import product

import torch
from sparse24_kernels import hard_problems
from sparse24_kernels.hard_problems import difference
from sparse24_kernels.operators import Operators
from torch import Tensor

GATED = ("gated_activation", "gated_activation_backward")
VALUES = {
    "special": (
        0.0,
        -0.0,
        1.0,
        -1.0,
        2.0,
        1e-45,
        -1e-38,
        1e38,
        -torch.inf,
        torch.nan,
    ),  # beyond, PyTorch's GELU overflows
    # Far into both tails, where exponentials overflow or vanish.
    "wide": (-1e4, -120.0, -89.0, -40.0, -9.0, -5.0, -1.3, -0.75, 1e-4, 0.5, 3.0, 11.0, 88.0, 90.0, 1e4),
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
MIXTURES = ["row row row", "row half half", "row column row", "column column-half row", "expanded row every-second"]
MIXTURES += ["offset offset offset", *(f"{view} {view} {view}" for view in list(LAYOUTS)[7:])]  # of grad, gate, up


def check(operator: str, table: Operators, device: torch.device, dtype: torch.dtype) -> None:
    """Raise AssertionError where an implementation differs from the reference."""
    function = getattr(table, operator)
    different = hard_problems.first_difference(operator, function, device, dtype)
    assert not different, different
    for arguments in gated_problems(device, dtype, 2 + GATED.index(operator)) if operator in GATED else ():
        different = hard_problems.compare(operator, function, arguments)
        assert not different, f"{different}, strides {[x.stride() for x in arguments[:-1]]}"


def gated_problems(device: torch.device, dtype: torch.dtype, count: int) -> Iterator[tuple]:
    """The last `count` of grad, gate and up, and the kind."""
    for kind, (shape, mixture) in product(
        ("swiglu", "geglu", "geglu-exact"), [((66, 10), each) for each in MIXTURES] + [((123, 72), MIXTURES[2])]
    ):
        generator = torch.Generator(device).manual_seed(len(mixture))
        grad, gate, up = torch.randn(3, *shape, generator=generator, device=device).mul(3).to(dtype)
        yield *(LAYOUTS[one](x) for one, x in list(zip(mixture.split(), (grad, gate, up)))[-count:]), kind
    for kind, values in product(("swiglu", "geglu", "geglu-exact"), VALUES.values()):
        triples = torch.tensor(list(product(values, repeat=3)), dtype=dtype, device=device)
        yield *triples.masked_fill(triples == torch.inf, 6e4).unbind(1)[-count:], kind  # 1e38 in fp16


def assert_same_bits(ours: Tensor, theirs: Tensor, name: str) -> None:
    """Equal bit for bit, except that any NaN equals any other."""
    different = difference(ours, theirs, theirs)
    assert not different, f"{name}: {different}"
