"""The Triton kernels against the reference, on CPU tensors in Triton's interpreter (see tests/conftest.py).

The same run compiled on a GPU under the marker gpu.
"""

import inspect
from collections.abc import Callable
from itertools import product

import pytest
import torch
from sparse24_kernels import cpu, gpu, hard_problems, reference
from sparse24_kernels.dispatch import KERNEL_DTYPES
from sparse24_kernels.hard_problems import compare
from torch import Tensor

# The interpreter computes with NumPy, which warns of the NaN and inf that are put in on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
every_operator = pytest.mark.parametrize("operator", [name for name, f in vars(gpu.OPERATORS).items() if f is not None])
every_dtype = pytest.mark.parametrize(
    "dtype", [pytest.param(x, marks=pytest.mark.slow if x is torch.float16 else ()) for x in KERNEL_DTYPES]
)


on_every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@every_operator
@every_dtype
@on_every_device
def test_kernel_equals_reference(operator, dtype, device, monkeypatch):
    monkeypatch.setattr(hard_problems, "PATTERNS", ((2, 4), (6, 8)))  # that it has, and has no kernel for
    kernel = getattr(gpu.OPERATORS, operator)
    assert hard_problems.first_difference(operator, kernel, torch.device(device), dtype) == ""


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
SPECIAL = (0.0, -0.0, 1.0, -1.0, 1e-45, -1e-38, 1e38, -torch.inf, torch.nan)  # beyond, PyTorch's GELU overflows
TAILS = (-1e4, -120.0, -89.0, -40.0, -9.0, -1.3, -0.75, 1e-4, 3.0, 11.0, 88.0, 90.0, 1e4)  # exp overflows or vanishes


@every_dtype
@on_every_device
@pytest.mark.parametrize("kind", ["swiglu", "geglu", "geglu-exact"])
def test_gated_activations_of_any_layout_and_value(kind, dtype, device):
    def check(*tensors: Tensor) -> None:
        same("gated_activation", *tensors[1:], kind)
        same("gated_activation_backward", *tensors, kind)

    for mixture in MIXTURES:
        x = torch.randn(3, 66, 10, device=device).mul(3).to(dtype)
        check(*(LAYOUTS[one](each) for one, each in zip(mixture.split(), x)))
    for values in (SPECIAL, TAILS):
        triples = torch.tensor(list(product(values, repeat=3)), dtype=dtype, device=device)
        check(*triples.masked_fill(triples == torch.inf, 6e4).unbind(1))  # 1e38 in fp16


@pytest.mark.parametrize("table", [gpu.OPERATORS, cpu.OPERATORS], ids=["gpu", "cpu"])
def test_operators_have_the_arguments_of_the_reference(table):
    for name, function in vars(table).items():
        if function is not None:
            theirs = getattr(reference.OPERATORS, name)
            assert inspect.signature(function) == inspect.signature(theirs), name


def same(operator: str, *arguments) -> None:
    assert compare(operator, getattr(gpu.OPERATORS, operator), arguments) == ""
