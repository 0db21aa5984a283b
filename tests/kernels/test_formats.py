"""Patterns, and the sizes of what is stored."""

import math

import pytest
import sparse24_kernels as kernels
import torch
from sparse24_kernels import Pattern, formats


def test_a_pattern_is_read_and_written():
    assert Pattern.parse("2:4") == Pattern(2, 4) == (2, 4)
    assert [str(Pattern.parse(text)) for text in ("2:4", "1:2", "4:16")] == ["2:4", "1:2", "4:16"]
    for wrong in ("2-4", "4:2", "4:4", "0:4", "-1:4", "2:4 ", "2:4:8", "two:four", "²:4", ""):
        with pytest.raises(ValueError) as caught:
            Pattern.parse(wrong)
        assert str(caught.value) == f"pattern={wrong!r}: must be 'N:M' with 0 < N < M, such as '2:4'"


def most_in_four(n: int, m: int) -> int:
    """How many of any aligned four elements an N:M mask can keep."""
    period = math.lcm(4, m)
    fours = [[element // m for element in range(start, start + 4)] for start in range(0, period, 4)]
    return max(sum(min(n, four.count(group)) for group in set(four)) for four in fours)


def test_patterns_within_24_keep_two_of_four_at_most():
    within = {(n, m) for m in range(2, 33) for n in range(1, m) if Pattern(n, m).is_within_24}
    assert within == {(n, m) for m in range(2, 33) for n in range(1, m) if most_in_four(n, m) <= 2}
    assert {(1, 2), (1, 4), (1, 8), (1, 16), (2, 4), (2, 8)} <= within
    assert not {(4, 8), (3, 4), (2, 6), (2, 3), (3, 6)} & within


def test_sizes_are_those_of_results():
    weight = torch.randn(6, 40)
    assert kernels.nm_mask(weight, packed=True).shape == formats.empty_mask(weight, packed=True).shape == (6, 5)
    assert formats.mask_bytes(40) == 5 and [formats.mask_bytes(size) for size in (0, 1, 8, 9)] == [0, 1, 1, 2]
    packed = kernels.pack_nm(weight, 6, 8)
    assert packed.values.shape == (6, 30) and packed.mask.shape == (6, 5) and packed.columns == 40
