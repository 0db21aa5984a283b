"""Masks and soft threshold: literal tables, special values, and the numbers of the papers."""

from itertools import product

import hypothesis.strategies as st
import pytest
import sparse24_kernels as kernels
import torch
from hypothesis import given, settings
from sparse24_kernels.decay import foreach_masked_decay_
from sparse24_kernels.fp8 import fp8_quantize
from sparse24_kernels.masks import count_flips

from hf_sparse24.metrics import is_nm_sparse, kept_magnitude

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


@pytest.mark.parametrize(
    ("group", "kept"),
    [
        ([4, 1, 3, 2], [1, 0, 1, 0]),
        ([-4, 1, 3, -5], [1, 0, 0, 1]),
        ([1, 1, 1, 1], [1, 1, 0, 0]),  # ties keep the lower index
        ([1, 2, 2, 2], [0, 1, 1, 0]),
        ([2, 1, 1, 1], [1, 1, 0, 0]),
        ([0, 0, 0, 0], [1, 1, 0, 0]),
        ([0, 0, 0, 7], [1, 0, 0, 1]),
        ([1, NAN, 2, 3], [0, 1, 0, 1]),  # NaN is the largest: kept, and so seen
        ([INF, 1, NAN, INF], [1, 0, 1, 0]),
        ([INF, INF, NAN, 1], [1, 0, 1, 0]),  # above inf
    ],
)
def test_mask_by_hand(group, kept):
    assert kernels.nm_mask(torch.tensor(group, dtype=torch.float32)).int().tolist() == kept


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


@pytest.mark.parametrize(
    ("group", "pruned"),
    [
        ([4, -1, 3, 2], [2, 0, 1, 0]),  # threshold 2, the second smallest
        ([-4, 1, 1, 5], [-3, 0, 0, 4]),
        ([1, 3, 3, 3], [0, 0, 0, 0]),  # |t2| = |t3| = |t4|: continuity costs the whole group
        ([2, 3, 3, 5], [0, 0, 0, 2]),
        ([0, 0, 2, -1], [0, 0, 2, -1]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_soft_threshold_by_hand(group, pruned):
    group = torch.tensor(group, dtype=torch.float32)
    actual = kernels.soft_threshold(group)
    assert actual.tolist() == pruned
    assert not torch.signbit(actual[actual == 0]).any()
    assert kernels.soft_threshold(group, scale=torch.tensor(1.5)).tolist() == [1.5 * value for value in pruned]
    # The general route (a sort) and the other dimension agree with the fast one.
    torch.testing.assert_close(kernels.soft_threshold(group[:, None], dim=0)[:, 0], actual)


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


def test_soft_threshold_is_continuous():
    """Moving a weight through the border changes the output by no more than it moved: no jump as in a hard mask."""
    start = torch.tensor([1.0, 2.0, 3.0, 2.5])
    steps = torch.linspace(0, 4, 4001)
    path = start.repeat(4001, 1)
    path[:, 0] = steps
    moved = kernels.soft_threshold(path).diff(dim=0).abs().max()
    assert moved <= 2 * (steps[1] - steps[0])
    assert kernels.apply_mask(path, kernels.nm_mask(path)).diff(dim=0).abs().max() > 2


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


def test_kept_magnitude_on_gaussian_blocks_matches_the_papers_values():
    weight = torch.randn(4000, 400)
    assert kept_magnitude(weight, kernels.nm_mask(weight)) == pytest.approx(0.7448, abs=1e-3)
    assert kept_magnitude(weight, kernels.transposable_mask(weight)) == pytest.approx(0.7026, abs=1e-3)


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
    with pytest.raises(ValueError, match=r"two masks of one shape, bool or packed bits, got torch.bool \(6, 20\) and"):
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


def test_the_dtype_of_a_result_is_rounded_once():
    weight, scale = torch.randn(8, 16), torch.tensor(1.483)
    soft = kernels.soft_threshold(weight, scale=scale)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(kernels.soft_threshold(weight, scale=scale, dtype=dtype), soft.to(dtype))
        assert torch.equal(kernels.nm_prune(weight, dtype=dtype), kernels.nm_prune(weight).to(dtype))
    fp8 = kernels.nm_prune(torch.tensor([1e4, -1e4, 1e-9, -1e-9]), dtype=torch.float8_e4m3fn)
    assert fp8.float().tolist() == [448, -448, 0, 0] and not torch.signbit(fp8.float()[2:]).any()
    tiny = kernels.apply_mask(torch.tensor([-1e-9, 1.0]), torch.tensor([True, True]), torch.float16)
    assert tiny.tolist() == [0, 1] and not torch.signbit(tiny[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_pack_and_unpack(dtype):
    weight = torch.randn(6, 24)
    pruned = kernels.nm_prune(weight, dtype=dtype)
    (packed,) = kernels.prune_forms(weight, ["packed"], dtype=dtype)
    assert packed.values.shape == (6, 12) and packed.indices.shape == (6, 3)
    unpacked = kernels.unpack_nm(packed)
    assert unpacked.dtype == dtype and torch.equal(unpacked.float(), pruned.float())
    size = sum(part.numel() * part.element_size() for part in packed)
    share = {torch.float32: 17 / 32, torch.bfloat16: 9 / 16, torch.float8_e4m3fn: 10 / 16}[dtype]
    assert size / (weight.numel() * pruned.element_size()) == share
    if dtype != torch.float8_e4m3fn:
        again = kernels.pack_nm(pruned)
        assert torch.equal(again.values, packed.values) and torch.equal(again.indices, packed.indices)


@pytest.mark.parametrize(
    ("mask", "stored"),
    [
        ([0, 0, 1, 0], [0, 2]),  # fewer than two: filled up with the first others, in order
        ([0, 1, 0, 0], [0, 1]),
        ([0, 0, 0, 0], [0, 1]),
        ([0, 1, 1, 0], [1, 2]),
        ([0, 0, 1, 1], [2, 3]),
        ([1, 1, 1, 1], [2, 3]),  # more than two: the last two
        ([1, 1, 1, 0], [1, 2]),
        ([1, 1, 0, 1], [1, 3]),
    ],
)
def test_what_is_packed(mask, stored):
    weight = torch.tensor([[1.0, 2, 3, 4, 5, 6, 7, 8]])
    kept = torch.tensor([[*mask, 1, 1, 0, 0]]).bool()
    (packed,) = kernels.prune_forms(weight, ["packed"], "mask", mask=kept)
    assert packed.indices.item() & 15 == stored[0] | stored[1] << 2
    expected = torch.zeros(8)
    expected[stored] = (weight * kept)[0, stored]
    expected[4:6] = weight[0, 4:6]
    assert kernels.unpack_nm(packed).tolist() == [expected.tolist()]


def test_what_is_kept_is_packed_even_beside_inf():
    row = torch.tensor([[INF, INF, NAN, 1.0, 1, 2, 3, 4]])
    unpacked = kernels.unpack_nm(kernels.pack_nm(row))
    assert unpacked[0, 0] == INF and unpacked[0, 2].isnan() and unpacked[0, 1] == 0


def test_packed_by_hand():
    row = torch.tensor([[0.0, 5, 0, 7, 0, 0, 3, 0]])
    packed = kernels.pack_nm(row)
    # (1, 3) and, with one non-zero, (0, 2): nibbles 1 | 3 << 2 and 0 | 2 << 2, the first group in the lower half.
    assert packed.values.tolist() == [[5, 7, 0, 3]] and packed.indices.tolist() == [[0b1000_1101]]
    zeros = kernels.pack_nm(torch.zeros(1, 8))
    assert zeros.indices.tolist() == [[0b0100_0100]]


def test_every_form_of_a_transposable_weight():
    weight = torch.randn(16, 24)
    mask = kernels.transposable_mask(weight)
    forms = ["packed-transposed", "dense", "transposed", "packed"]
    across, dense, transposed, along = kernels.prune_forms(weight, forms, "mask", mask=mask, dtype=torch.bfloat16)
    expected = (weight * mask).bfloat16()
    assert torch.equal(dense, expected)
    assert torch.equal(transposed, expected.t()) and transposed.is_contiguous()
    assert torch.equal(kernels.unpack_nm(along), expected)
    assert torch.equal(kernels.unpack_nm(across), expected.t())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(4, 8), ["dens"]), "form='dens': must be one of"),
        ((torch.ones(8), ["dense"]), r"needs a matrix, got shape \(8,\)"),
        ((torch.ones(4, 12), ["packed"]), r"packed: dimension 1 of shape \(4, 12\) must be a multiple of 8"),
        ((torch.ones(8, 8), ["packed-transposed"]), "needs groups along dimension 0, and 'magnitude' has dim=-1"),
        ((torch.ones(8, 8), ["dense"], "mask"), "rule='mask' needs a mask"),
        ((torch.ones(8, 8), ["dense"], "median"), "rule='median': must be one of"),
    ],
)
def test_forms_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        kernels.prune_forms(*arguments)
    with pytest.raises(ValueError, match="makes its own mask"):
        kernels.prune_forms(torch.ones(8, 8), ["dense"], mask=torch.ones(8, 8).bool())


def test_foreach_masked_decay_equals_one_by_one():
    weights = [torch.randn(4, 8), torch.randn(3, 5)]
    masks = [kernels.nm_mask(weights[0], packed=True), torch.rand(3, 5) < 0.5]
    grads, expected = ([torch.ones_like(weight) for weight in weights] for _ in range(2))
    foreach_masked_decay_(grads, weights, masks, [0.1, 0.2])
    for grad, weight, mask, alpha in zip(expected, weights, masks, [0.1, 0.2]):
        kernels.masked_decay_(grad, weight, mask, alpha)
    torch.testing.assert_close(grads, expected)
    with pytest.raises(ValueError, match="as many gradients as weights, masks and alphas, got 2, 2, 2 and 1"):
        foreach_masked_decay_(grads, weights, masks, [0.1])
    with pytest.raises(ValueError, match=r"gradient and weight of one shape, got \(4, 8\) and \(3, 5\)"):
        kernels.masked_decay_(grads[0], weights[1], masks[1], 0.1)


def test_masked_decay_rounds_once():
    grad, weight = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.00390625 + 2**-8])
    kernels.masked_decay_(grad, weight, torch.tensor([False]), 1.0)
    assert grad.item() == torch.tensor(1.0 + weight.item()).bfloat16().item()


def test_masked_decay():
    grad, weight = torch.tensor([1.0, 1.0]), torch.tensor([10.0, -20.0])
    returned = kernels.masked_decay_(grad, weight, torch.tensor([True, False]), 0.1)
    assert grad.tolist() == [1.0, -1.0] and returned is grad


META = torch.device("meta")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: kernels.apply_mask(x, (x > 0).to(META)), "different devices: cpu, meta"),
        (lambda x: count_flips([x > 0], [(x > 0).to(META)]), "different devices: cpu, meta"),
        (lambda x: kernels.masked_decay_(x, x.to(META), x > 0, 1.0), "different devices: cpu, meta"),
        (lambda x: kernels.gated_activation(x, x.to(META), "swiglu"), "different devices: cpu, meta"),
        (lambda x: kernels.soft_threshold(x, scale=torch.ones((), device=META)), "different devices: cpu, meta"),
        (lambda x: kernels.soft_threshold(x, scale=torch.ones(4)), r"scale is a floating 0-d tensor, got .* \(4,\)"),
        (lambda x: kernels.prune_forms(x, ["dense"], scale=torch.ones(())), "rule='magnitude' has no scale"),
        (lambda x: kernels.nm_mask(x, dim=2), r"nm_mask: dim=2 of a tensor of shape \(8, 16\)"),
        (lambda x: kernels.mvue(x, dim=5), r"mvue: dim=5 of a tensor of shape \(8, 16\)"),
        (lambda x: kernels.mvue(x[0, 0]), r"mvue: dim=-1 of a tensor of shape \(\)"),
        (
            lambda x: kernels.mvue(x, key=torch.tensor([1, 2])),
            r"key=.*\(2,\): must be an int of 64 bits or an int64",
        ),
        (lambda x: kernels.mvue(x.long()), "mvue takes fp64, fp32, bf16 and fp16, got torch.int64"),
        (lambda x: kernels.transposable_mask(x.long()), "transposable_mask takes fp64"),
        (lambda x: kernels.apply_mask(x.long(), x > 0), "apply_mask takes fp64"),
        (lambda x: fp8_quantize(x.long(), "e4m3"), "fp8_quantize takes fp64"),
        (lambda x: kernels.gated_activation(x.long(), x.long(), "swiglu"), "gated_activation takes fp64"),
        (lambda x: kernels.nm_prune(x, dtype=torch.int8), "dtype=torch.int8: must be one of"),
        (lambda x: kernels.nm_prune(x, dtype=torch.float8_e4m3fnuz), "dtype=torch.float8_e4m3fnuz: must be one of"),
        (lambda x: kernels.prune_forms(x, ["dense", "dense"]), "must be a list of different forms"),
        (lambda x: kernels.prune_forms(x, "dense"), "must be a list of different forms"),
        (lambda x: kernels.prune_forms(x, []), "must be a list of different forms"),
        (lambda x: kernels.pack_bits(x.byte()), "takes a bool mask with a last dimension, got torch.uint8"),
        (lambda x: kernels.unpack_bits(kernels.pack_bits(x > 0), 30), r"got torch.uint8 \(8, 2\) and size=30"),
        (lambda x: kernels.unpack_nm(kernels.Packed(x, torch.zeros(8, 1, dtype=torch.uint8))), "takes values"),
    ],
)
def test_what_does_not_fit_is_told(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(8, 16))
