"""The Triton kernels against the reference, on CPU tensors in Triton's interpreter (see tests/conftest.py).

The same cases run compiled on a GPU by `make gpu`, and here under the marker gpu.
"""

import dataclasses
import inspect

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from kernel_cases import all_cases, check
from sparse24_kernels import cpu, gpu, reference

from recipes.benchmarks.cases import DTYPES, Case, draw

# The interpreter computes with NumPy, which warns of the NaN and inf that are put in on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU = torch.device("cpu")
ALL_CASES = list(all_cases())


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_kernel_equals_reference(case):
    check(case, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_compiled_kernel_equals_reference(case):
    check(case, torch.device("cuda"))


@pytest.mark.parametrize("table", [gpu.OPERATORS, cpu.OPERATORS], ids=["gpu", "cpu"])
def test_operators_have_the_arguments_of_the_reference_and_a_case(table):
    tested = {case.function.split(".")[1] for case in ALL_CASES}
    tested |= {"masked_decay_", "packed_mm"}  # cpu/test_prune.py, test_cpu_backend.py
    for name, function in vars(table).items():
        if function is not None:
            theirs = getattr(reference.OPERATORS, name)
            assert inspect.signature(function) == inspect.signature(theirs) and name in tested, name


def test_a_wrong_kernel_is_caught(monkeypatch):
    """The check itself: one flipped bit, an element that was never written, a value that is slightly off."""
    case = Case("masks.nm_mask", "", lambda device: (draw(device, (64, 64)), 2, 4, 1, True))
    kernel, scale = gpu.OPERATORS.nm_mask, gpu.OPERATORS.s_ste_scale

    def flipped(*arguments):
        mask = kernel(*arguments)
        mask[3, 5] ^= 1
        return mask

    def use(**functions):
        monkeypatch.setattr(gpu, "OPERATORS", dataclasses.replace(gpu.OPERATORS, **functions))

    use(nm_mask=flipped)
    with pytest.raises(AssertionError, match=r"1 of 512 elements differ, first \d+ at \[3, 5\]"):
        check(case, CPU)
    case = Case("prune.s_ste_scale", "", lambda device: (draw(device, (64, 64)), 2, 4, 1, "mse"), exact=False)
    use(s_ste_scale=lambda *arguments: scale(*arguments) * (1 + 1e-5))
    with pytest.raises(AssertionError, match="worse than the reference's"):
        check(case, CPU)
    use(unpack_nm=lambda values, *_: torch.empty(len(values), 2 * values.shape[1]))
    unwritten = next(case for case in ALL_CASES if case.function == "packed.unpack_nm")
    with pytest.raises(AssertionError, match="differ"):
        check(unwritten, CPU)


floats = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 2.0, 2.0 + 2**-22, 1e-45, -1e-40, 65504.0, 3e38, float("inf"), float("nan")]
)
dtypes = st.sampled_from(DTYPES)


@st.composite
def matrices(draw, multiple: int):
    """Matrices of special values and a few random ones, with odd sizes; the grouped size a multiple of `multiple`."""
    rows, groups = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    shape = (rows, groups * multiple)
    values = draw(st.lists(floats | st.floats(-4, 4, width=32), min_size=4, max_size=16))
    picks = torch.randint(len(values), shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return torch.tensor(values)[picks].to(draw(dtypes))


@given(matrices(4), st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_masks_of_any_values(matrix, columns, packed):
    matrix = matrix.t().contiguous() if columns else matrix
    check(Case("masks.nm_mask", "any", lambda _: (matrix, 2, 4, 0 if columns else 1, packed)), CPU)


@given(matrices(4), st.sampled_from(["magnitude", "soft-threshold"]), dtypes)
@settings(max_examples=40, deadline=None)
def test_pruning_any_values(matrix, rule, dtype):
    scale = torch.tensor(1.5)
    check(
        Case("prune.prune", "any", lambda _: (matrix, rule, 2, 4, 1, None, scale, dtype, ["dense", "transposed"])), CPU
    )


@given(matrices(4), st.booleans())
@settings(max_examples=30, deadline=None)
def test_transposable_masks_of_any_values(matrix, packed):
    square = matrix.repeat(4, 1)
    square = torch.cat([row.roll(i, 0) for i, row in enumerate(square.split(1))])
    check(Case("transposable.transposable_mask", "any", lambda _: (square, 2, 4, "exact", packed)), CPU)


@given(matrices(1), st.sampled_from([(2, 4), (1, 2)]), st.integers(0, 1), st.integers(-(2**63), 2**63 - 1))
@settings(max_examples=40, deadline=None)
def test_mvue_of_any_values_by_the_same_random_numbers(matrix, pattern, dim, key):
    arguments = (matrix, torch.tensor(key), *pattern, dim, "exact", "dense")
    check(Case("mvue.mvue", "any", lambda _: arguments), CPU)
