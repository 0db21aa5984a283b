"""The Triton kernels against the reference, on CPU tensors in Triton's interpreter (see tests/conftest.py).

The same run compiled on a GPU under the marker gpu.
"""

import inspect
from collections.abc import Callable
from itertools import product

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from sparse24_kernels import cpu, gpu, hard_problems, reference
from sparse24_kernels.dispatch import KERNEL_DTYPES
from sparse24_kernels.hard_problems import compare
from sparse24_kernels.operators import Pruning
from torch import Tensor

# The interpreter computes with NumPy, which warns of the NaN and inf that are put in on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
every_operator = pytest.mark.parametrize("operator", [name for name, f in vars(gpu.OPERATORS).items() if f is not None])
every_dtype = pytest.mark.parametrize("dtype", KERNEL_DTYPES)


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


floats = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 2.0, 2.0 + 2**-22, 1e-45, -1e-40, 65504.0, 3e38, float("inf"), float("nan")]
)
dtypes = st.sampled_from(KERNEL_DTYPES)


@st.composite
def matrices(draw, multiple: int):
    """Matrices of special values and a few random ones, with odd sizes; the grouped size a multiple of `multiple`."""
    rows, groups = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    shape = (rows, groups * multiple)
    values = draw(st.lists(floats | st.floats(-4, 4, width=32), min_size=4, max_size=16))
    picks = torch.randint(len(values), shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return torch.tensor(values)[picks].to(draw(dtypes))


@given(matrices(4), st.booleans(), st.booleans())
@settings(max_examples=15, deadline=None)
def test_masks_of_any_values(matrix, columns, packed):
    matrix = matrix.t().contiguous() if columns else matrix
    same("nm_mask", matrix, 2, 4, 0 if columns else 1, packed)


@given(matrices(4), st.sampled_from(["magnitude", "soft-threshold"]), dtypes)
@settings(max_examples=15, deadline=None)
def test_pruning_any_values(matrix, rule, dtype):
    forms = ["dense", "transposed"]
    same("prune", matrix, Pruning(rule, dim=1, scale=torch.tensor(1.5), dtype=dtype, forms=forms))


@given(matrices(4), st.booleans())
@settings(max_examples=15, deadline=None)
def test_transposable_masks_of_any_values(matrix, packed):
    square = matrix.repeat(4, 1)
    square = torch.cat([row.roll(i, 0) for i, row in enumerate(square.split(1))])
    same("transposable_mask", square, 2, 4, "exact", packed)


@given(matrices(1), st.sampled_from([(2, 4), (1, 2)]), st.integers(0, 1), st.integers(-(2**63), 2**63 - 1))
@settings(max_examples=15, deadline=None)
def test_mvue_of_any_values_by_the_same_random_numbers(matrix, pattern, dim, key):
    same("mvue", matrix, torch.tensor(key), *pattern, dim, "exact", "dense")
