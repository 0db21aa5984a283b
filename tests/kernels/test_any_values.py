"""The Triton kernels against the reference on values that Hypothesis chooses, in Triton's interpreter."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from sparse24_kernels import gpu
from sparse24_kernels.dispatch import KERNEL_DTYPES
from sparse24_kernels.hard_problems import compare
from sparse24_kernels.operators import Pruning

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN and inf
floats = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 2.0, 2.0 + 2**-22, 1e-45, -1e-40, 65504.0, 3e38, float("inf"), float("nan")]
)
dtypes = st.sampled_from(KERNEL_DTYPES)


def same(operator: str, *arguments) -> None:
    assert compare(operator, getattr(gpu.OPERATORS, operator), arguments) == ""


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
