"""Soft threshold, its scale and the forms of a pruned weight: literal tables, and the numbers of the papers."""

from itertools import product

import pytest
import sparse24_kernels as kernels
import torch
from sparse24_kernels.prune import prune_forms

from hf_sparse24.metrics import is_nm_sparse

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("function", [kernels.nm_mask, kernels.soft_threshold, kernels.s_ste_scale])
def test_bad_shapes_and_patterns(function):
    with pytest.raises(ValueError, match=r"dimension -1 of shape \(8, 6\) must be a multiple of 4"):
        function(torch.ones(8, 6))
    with pytest.raises(ValueError, match=r"takes fp64, fp32, bf16 and fp16, got torch.int64"):
        function(torch.ones(8, 8, dtype=torch.int64))
    for n, m in [(0, 4), (4, 4), (5, 4), (-1, 2)]:
        with pytest.raises(ValueError, match=f"got {n}:{m}"):
            function(torch.ones(8, 8), n, m)


def test_apply_mask_never_writes_negative_zero():
    weight = torch.tensor([-0.0, -1.0, 2.0, -0.0])
    masked = kernels.apply_mask(weight, torch.tensor([True, False, True, True]))
    assert masked.tolist() == [0, 0, 2, 0]
    assert not torch.signbit(masked).any()


def test_soft_threshold_on_special_values():
    groups = torch.tensor(list(product([0.0, -0.0, 1.0, -2.0, -1e-45, 3e38], repeat=4)))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        weight = groups.to(dtype).nan_to_num(posinf=6e4)
        pruned = kernels.soft_threshold(weight, scale=torch.tensor(0.7))
        assert pruned.dtype == dtype
        assert is_nm_sparse(pruned)
        assert not torch.signbit(pruned[pruned == 0]).any()
    assert kernels.soft_threshold(torch.tensor([NAN, 1.0, 2.0, 3.0])).isnan().any()


def test_soft_threshold_of_other_patterns_uses_the_kth_smallest():
    group = torch.tensor([[5.0, -4.0, 3.0, 2.0, 1.0, 0.5, 0.25, 6.0]])
    assert kernels.soft_threshold(group, 2, 8).tolist() == [[1, 0, 0, 0, 0, 0, 0, 2]]
    assert kernels.soft_threshold(torch.tensor([3.0, -5.0]), 1, 2).tolist() == [0, -2]


def uniform(*shape):
    return torch.rand(*shape) * 2 - 1


@pytest.mark.parametrize(
    ("draw", "rule", "beta"),
    [(torch.randn, "mse", 1.483), (uniform, "mse", 1.751), (torch.randn, "l1", 2.512), (torch.randn, "none", 1.0)],
)
def test_s_ste_scale_matches_the_papers_values(draw, rule, beta):
    weight = draw(2000, 1000)
    scale = kernels.s_ste_scale(weight, rule=rule).item()
    assert scale == pytest.approx(beta, abs=6e-3)
    assert kernels.s_ste_scale(100 * weight, rule=rule).item() == pytest.approx(scale, rel=1e-5)


@pytest.mark.parametrize("rule", ["mse", "l1"])
@pytest.mark.parametrize("exponent", [-1000, -130, -83, -41, 60, 64, 119, 1000])
def test_s_ste_scale_of_weights_of_any_size(exponent, rule):
    """Where squares, or sums of them, are beyond fp32, or fp64, too."""
    weight = torch.randint(-128, 129, (64, 64)).to(torch.float64 if abs(exponent) == 1000 else torch.float32)
    assert torch.equal(kernels.s_ste_scale(weight * 2.0**exponent, rule=rule), kernels.s_ste_scale(weight, rule=rule))


def test_s_ste_scale_rules():
    group = torch.tensor([4.0, -1, 3, 2])  # S = [2, 0, 1, 0]
    assert kernels.s_ste_scale(group, rule="mse").item() == pytest.approx((8 + 3) / 5)
    assert kernels.s_ste_scale(group, rule="l1").item() == pytest.approx(10 / 3)
    assert kernels.s_ste_scale(group, rule="none").item() == 1.0
    with pytest.raises(ValueError, match=r"rule='l2': must be one of \['mse', 'l1', 'none'\]"):
        kernels.s_ste_scale(group, rule="l2")


def test_s_ste_scale_minimises_the_error_and_survives_zeros():
    weight = torch.randn(64, 64, dtype=torch.float64)
    pruned, beta = kernels.soft_threshold(weight), kernels.s_ste_scale(weight)
    error = [(weight - b * pruned).square().sum().item() for b in (beta, beta * 1.01, beta * 0.99)]
    assert error[0] < min(error[1:])
    assert kernels.s_ste_scale(torch.zeros(4, 4)).item() == 1.0
    assert kernels.s_ste_scale(torch.ones(4, 4)).item() == 1.0  # ties prune everything


def test_the_dtype_of_a_result_is_rounded_once():
    weight, scale = torch.randn(8, 16), torch.tensor(1.483)
    soft = kernels.soft_threshold(weight, scale=scale)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(kernels.soft_threshold(weight, scale=scale, dtype=dtype), soft.to(dtype))
        assert torch.equal(kernels.nm_prune(weight, dtype=dtype), kernels.nm_prune(weight).to(dtype))
    tiny = kernels.apply_mask(torch.tensor([-1e-9, 1.0]), torch.tensor([True, True]), torch.float16)
    assert tiny.tolist() == [0, 1] and not torch.signbit(tiny[0])


WITHIN_24 = [(1, 2), (1, 3), (1, 4), (1, 8), (1, 16), (2, 8), (2, 12)]
"""Patterns other than 2:4 whose matrices are 2:4."""


def with_zeros(rows: int = 48, columns: int = 96) -> torch.Tensor:
    """A bf16 matrix with groups of fewer non-zeros than a pattern keeps, of +0.0 and of -0.0, and ties."""
    weight = torch.randn(rows, columns)
    weight[3], weight[:, :4], weight[5, 16:32], weight[6] = 0.0, 0.0, -0.0, weight[6].sign()
    return weight.bfloat16()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("n", "m"), WITHIN_24)
def test_patterns_within_24(n, m, dim):
    weight, scale = with_zeros(), torch.tensor(1.5)
    for rule, dense, arguments in (
        ("magnitude", kernels.nm_prune(weight, n, m, dim), {}),
        ("soft-threshold", kernels.soft_threshold(weight, n, m, dim, scale), {"scale": scale}),
        ("mask", kernels.nm_prune(weight, n, m, dim), {"mask": kernels.nm_mask(weight, n, m, dim, packed=True)}),
    ):
        found, transposed = prune_forms(weight, ["dense", "transposed"], rule, n, m, dim, **arguments)
        assert torch.equal(found, dense) and torch.equal(transposed, dense.t()) and is_nm_sparse(found, n, m, dim)
        assert not torch.signbit(found[found == 0]).any()
    if dim:  # what is within 2:4 has a packed form of 2:4, too
        assert torch.equal(kernels.unpack_nm(kernels.pack_nm(dense)), dense)


def test_what_is_kept_is_packed_even_beside_inf():
    row = torch.tensor([[INF, INF, NAN, 1.0, 1, 2, 3, 4]])
    unpacked = kernels.unpack_nm(kernels.pack_nm(row))
    assert unpacked[0, 0] == INF and unpacked[0, 2].isnan() and unpacked[0, 1] == 0


def test_packed_by_hand():
    row = torch.tensor([[0.0, 5, 0, 7, 0, 0, 3, 0]])
    packed = kernels.pack_nm(row)
    # Places 1 and 3 and, with one non-zero, 0 and 2; the first group in the lower half.
    assert packed.values.tolist() == [[5, 7, 0, 3]] and packed.mask.tolist() == [[0b0101_1010]]
    assert kernels.pack_nm(torch.zeros(1, 8)).mask.tolist() == [[0b0011_0011]]


def test_forms_share_no_memory():
    """Not even of one row, whose transpose lies as it does."""
    dense, transposed = prune_forms(torch.randn(1, 64), ["dense", "transposed"])
    transposed.zero_()
    assert transposed.shape == (64, 1) and dense.count_nonzero() == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(4, 8), ["dens"]), "form='dens': must be one of"),
        ((torch.ones(8), ["dense"]), r"needs a matrix, got shape \(8,\)"),
        ((torch.ones(8, 8), ["dense"], "mask"), "rule='mask' needs a mask"),
        ((torch.ones(8, 48), ["packed"]), r"a multiple of 32 along dimension 1, got torch.float32 \(8, 48\)"),
        ((torch.ones(32, 32), ["packed-transposed"]), "needs groups along dimension 0, not 1"),
        ((torch.ones(64, 96).half(), ["sm90"]), r"multiples of 64, got torch.float16 \(64, 96\)"),
        ((torch.ones(64, 64), ["sm90"]), "bf16 or fp16, and multiples of 64, got torch.float32"),
    ],
)
def test_forms_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        prune_forms(*arguments)
    with pytest.raises(ValueError, match="makes its own mask"):
        prune_forms(torch.ones(8, 8), ["dense"], mask=torch.ones(8, 8).bool())
