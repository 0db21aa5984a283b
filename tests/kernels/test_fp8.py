"""FP8 simulation on literal numbers: every value, ties, subnormals, scales, and what has no scale."""

import pytest
import torch
from sparse24_kernels.fp8 import fp8_simulate

MAX = {"e4m3": 448.0, "e5m2": 57344.0}
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
both = pytest.mark.parametrize("format", ["e4m3", "e5m2"])


def simulate(values: list[float], format: str) -> list[float]:
    """With the format's largest value appended, so that the scale is 1."""
    return fp8_simulate(torch.tensor([*values, MAX[format]]), format).tolist()[:-1]


def test_e4m3_rounds_to_nearest_even():
    # Four significant bits: steps of 2 in [16, 32), of 32 in [256, 448].
    assert simulate([17, 19, 21, 17.01, 18.99, -17, -19], "e4m3") == [16, 20, 20, 18, 18, -16, -20]
    assert simulate([272, 304, 303, 431, 433, -447], "e4m3") == [256, 320, 288, 416, 448, -448]
    assert simulate([0.1, 1 / 3], "e4m3") == [0.1015625, 0.34375]


def test_e5m2_rounds_to_nearest_even():
    # Three significant bits: steps of 4 in [16, 32), of 8192 in [32768, 57344].
    assert simulate([18, 22, 26, 30, 18.01, -18], "e5m2") == [16, 24, 24, 32, 20, -16]
    assert simulate([36864, 45056, 53248, 53249], "e5m2") == [32768, 49152, 49152, 57344]


def test_subnormals():
    # e4m3: multiples of 2^-9 below 2^-6; half of the smallest is a tie, and zero is even. e5m2: of 2^-16.
    unit = 2.0**-9
    assert simulate([unit, 2.4 * unit, 2.5 * unit, 3.5 * unit], "e4m3") == [unit, 2 * unit, 2 * unit, 4 * unit]
    assert simulate([0.5 * unit, 0.51 * unit, -0.5 * unit], "e4m3") == [0, unit, 0]
    unit = 2.0**-16
    assert simulate([unit, 1.5 * unit, 2.5 * unit, 0.5 * unit], "e5m2") == [unit, 2 * unit, 2 * unit, 0]


@both
def test_every_finite_value_of_the_format_is_kept(format):
    values = torch.arange(256, dtype=torch.uint8).view(DTYPES[format]).float()
    values = values[values.isfinite()]
    assert values.max() == MAX[format]
    assert torch.equal(fp8_simulate(values, format), values)


@both
def test_tensors_so_small_that_the_scale_would_overflow(format):
    for amax in (1e-38, 1e-40, 1.4e-45):
        x = torch.tensor([amax, -amax / 2, 0.0])
        y = fp8_simulate(x, format)
        assert y.isfinite().all() and (y.abs() <= 1.2 * x.abs()).all()


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_half_precision_is_computed_in_fp32(format, dtype):
    x = torch.randn(8, 16).to(dtype)
    expected = fp8_simulate(x.float(), format).to(dtype)
    assert torch.equal(fp8_simulate(x, format), expected)


@both
def test_shapes_and_strides(format):
    for shape in ((0,), (3, 0), (0, 4), (), (2, 3, 4)):
        assert fp8_simulate(torch.ones(shape), format).shape == shape
    x = torch.randn(6, 4)
    y = fp8_simulate(x.t(), format)
    assert y.stride() == x.t().stride() and torch.equal(y.t(), fp8_simulate(x, format))
    before = x.clone()
    fp8_simulate(x, format)
    assert torch.equal(x, before)


@pytest.mark.parametrize("format", MAX)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_makes_the_result_nan(value, format):
    x = torch.ones(4, 8)
    x[0, 0] = value
    assert fp8_simulate(x, format).isnan().all()
