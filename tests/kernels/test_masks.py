"""Masks by magnitude, as bool and as packed bits: literal tables, special values, and how many entries differ."""

from itertools import product

import hypothesis.strategies as st
import pytest
import sparse24_kernels as kernels
import torch
from hypothesis import given, settings
from sparse24_kernels.masks import count_flips

from hf_sparse24.metrics import is_nm_sparse

NAN, INF = float("nan"), float("inf")
SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, -1e38, INF, NAN]


def sorted_mask(weight: torch.Tensor, n: int, m: int) -> torch.Tensor:
    """The mask by an independent route: Python's stable sort, group by group."""
    rows = []
    for group in weight.reshape(-1, m).tolist():
        key = [(1, 0) if value != value else (0, abs(value)) for value in group]  # NaN above inf
        kept = sorted(range(m), key=lambda i: key[i], reverse=True)[:n]
        rows.append([i in kept for i in range(m)])
    return torch.tensor(rows, dtype=torch.bool).reshape(weight.shape)


def test_mask_equals_a_sort_on_all_special_groups():
    groups = torch.tensor(list(product(SPECIAL, repeat=4)))
    torch.testing.assert_close(kernels.nm_mask(groups), sorted_mask(groups, 2, 4))


@given(
    n=st.integers(1, 7),
    extra=st.integers(1, 8),
    rows=st.integers(0, 5),
    groups=st.integers(1, 4),
    dim=st.sampled_from([0, 1, -1]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_mask_of_any_pattern(n, extra, rows, groups, dim, dtype, seed):
    m = n + extra
    # Small integers, so that ties are common.
    weight = torch.randint(-3, 4, (rows, groups * m), generator=torch.Generator().manual_seed(seed)).to(dtype)
    expected = sorted_mask(weight, n, m)
    actual = kernels.nm_mask(weight.t() if dim == 0 else weight, n, m, dim)  # dim 0: non-contiguous as well
    torch.testing.assert_close(actual.t() if dim == 0 else actual, expected)
    assert is_nm_sparse(expected.int(), n, m)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64, 123])
def test_bits_round_trip(size):
    mask = torch.rand(3, size) < 0.5
    packed = kernels.pack_bits(mask)
    assert packed.shape == (3, (size + 7) // 8) and packed.dtype == torch.uint8
    torch.testing.assert_close(kernels.unpack_bits(packed, size), mask)


def test_bit_order():
    assert kernels.pack_bits(torch.tensor([True, False, False, True])).tolist() == [9]


def test_count_flips():
    before, after = torch.rand(6, 20) < 0.5, torch.rand(6, 20) < 0.5
    masks = [before, kernels.pack_bits(after[:, :12]), before]
    flips = count_flips(masks, [after, kernels.pack_bits(before[:, :12]), before])
    assert flips.tolist() == [(before ^ after).sum(), (before ^ after)[:, :12].sum(), 0]
    assert count_flips([], []).tolist() == []
    with pytest.raises(ValueError, match=r"two masks of one shape, .*, got tensor of torch.bool \(6, 20\) and"):
        count_flips([before], [after[:, :17]])  # as many bytes of bits
    with pytest.raises(ValueError, match="as many masks before as after, got 1 and 0"):
        count_flips([before], [])


def test_packed_masks_are_masks():
    weight = torch.randn(12, 20)
    for dim in (0, 1):
        mask, bits = kernels.nm_mask(weight, dim=dim), kernels.nm_mask(weight, dim=dim, packed=True)
        assert torch.equal(kernels.pack_bits(mask), bits)
        assert torch.equal(kernels.apply_mask(weight, bits), kernels.apply_mask(weight, mask))
        assert torch.equal(kernels.nm_prune(weight, dim=dim), kernels.apply_mask(weight, mask))
    bits = kernels.transposable_mask(weight, packed=True)
    assert torch.equal(bits, kernels.pack_bits(kernels.transposable_mask(weight)))
    for bad in (bits[:, :1], mask.t(), mask.float()):
        with pytest.raises(ValueError, match=r"bool of that shape or uint8 bits of shape \(12, 3\), got"):
            kernels.apply_mask(weight, bad)
