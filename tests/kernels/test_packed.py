"""Packed weights: how they are packed in stacks, which way a linear layer takes, and that all ways agree."""

import pytest
import sparse24_kernels as kernels
import torch
from cslt import stand_in  # noqa: F401 (a fixture)
from sparse24_kernels import Packed, gpu
from sparse24_kernels.cpu import limits
from sparse24_kernels.gemm import GemmPlan, compress, linear_problem, mm_problem, plan_packed
from sparse24_kernels.gemm import packed as packed_gemm
from sparse24_kernels.gemm.backend import DENSE
from sparse24_kernels.gemm.packed import PACKED
from sparse24_kernels.packing import gather_nm, wrong_mask
from torch.nn import functional as F

CPU, BF16, INF = torch.device("cpu"), torch.bfloat16, float("inf")
KERNEL = GemmPlan(PACKED, "requested")


@pytest.fixture
def planned_for_gpu(monkeypatch):
    most_tokens, gpu = packed_gemm._most_tokens, torch.device("cuda")
    monkeypatch.setattr(packed_gemm, "unsupported_device", lambda device, dtype: None)
    monkeypatch.setattr(packed_gemm, "_most_tokens", lambda device, *layer: most_tokens(gpu, *layer))


@pytest.fixture
def has_kernels(planned_for_gpu, monkeypatch):
    """As on a GPU: the kernel in Triton's interpreter."""
    monkeypatch.setattr(packed_gemm, "implementation", lambda operator, x: gpu.packed.packed_linear)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16, torch.float16])
def test_dense_math_on_a_packed_weight_has_the_bits_of_dense_math(dtype, dense_math):
    weight, bias = kernels.nm_prune(torch.randn(24, 40)).to(dtype), torch.randn(24).to(dtype)
    packed = kernels.pack_nm(weight)
    for x in (torch.randn(2, 3, 40).to(dtype), torch.randn(40).to(dtype), torch.randn(0, 40).to(dtype)):
        assert torch.equal(kernels.packed_linear(x, packed), F.linear(x, weight))
        for plan in (None, KERNEL):  # without kernels, what stands for the kernel is dense math too
            assert torch.equal(kernels.packed_linear(x, packed, bias, plan=plan), F.linear(x, weight, bias))


def test_torch_compile_asks_for_the_limit_of_the_layer(monkeypatch):
    """Dynamo once handed on an empty tuple: whatever a machine had measured was not found."""
    asked, most_tokens = [], limits.most_tokens
    monkeypatch.setattr(limits, "most_tokens", lambda layer: asked.append(layer) or most_tokens(layer))
    monkeypatch.setattr(packed_gemm, "unsupported_device", lambda device, dtype: None)
    packed = kernels.pack_nm(torch.randn(48, 64))
    torch.compile(lambda x: kernels.packed_linear(x, packed), backend="eager", fullgraph=True)(torch.randn(3, 64))
    has_kernels = packed_gemm.choose_kernels(CPU).implementation == "cpu"
    assert set(asked) == ({"float32 float32 2:4 48 x 64"} if has_kernels else set())


def test_a_stack_is_packed_matrix_by_matrix():
    stack = kernels.nm_prune(torch.randn(3, 5, 16))
    packed = kernels.pack_nm(stack)
    assert [tuple(x.shape) for x in packed[:2]] == [(3, 5, 8), (3, 5, 2)]
    assert torch.equal(kernels.unpack_nm(packed), stack)
    for i, matrix in enumerate(stack):
        for ours, theirs in zip(kernels.pack_nm(matrix)[:2], packed[:2], strict=True):
            assert torch.equal(ours, theirs[i])
    with pytest.raises(ValueError, match=r"pack_nm needs a matrix or a stack of matrices, got shape \(16,\)"):
        kernels.pack_nm(stack[0, 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16, torch.float16])
@pytest.mark.parametrize(("n", "m"), [(2, 4), (16, 32), (6, 8), (1, 8), (63, 64), (1, 2)])
def test_packing_keeps_the_largest_in_order(n, m, dtype):
    weight = torch.randn(5, 3 * max(m, 8)).to(dtype)
    packed = kernels.pack_nm(weight, n, m)
    assert packed.pattern == (n, m) and packed.columns == weight.shape[1] and wrong_mask(packed) is None
    kept = kernels.nm_mask(weight, n, m)
    assert torch.equal(kernels.unpack_bits(packed.mask, weight.shape[1]), kept)
    assert torch.equal(packed.values.flatten(), weight[kept])
    assert torch.equal(kernels.unpack_nm(packed), kernels.nm_prune(weight, n, m))
    assert packed.values.nbytes + packed.mask.nbytes == weight.nbytes * n // m + weight.numel() // 8


def test_a_mask_says_what_is_kept():
    """Fewer than N are filled up with the first others, of more the first N stay."""
    weight = torch.arange(1.0, 9).view(1, 8)
    mask = torch.tensor([[False, False, False, True, True, True, False, True]])
    for given in (mask, kernels.pack_bits(mask)):
        assert kernels.pack_nm(weight, mask=given).values.tolist() == [[1, 4, 5, 6]]


@pytest.mark.parametrize(
    ("n", "m", "k", "message"),
    [
        (3, 5, 40, "M of a packed 3:5 must divide 64"),
        (2, 4, 12, "rows of a packed 2:4 have multiples of 8 elements, not 12"),
        (16, 32, 40, "rows of a packed 16:32 have multiples of 32 elements, not 40"),
    ],
)
def test_what_has_no_packed_form_is_told(n, m, k, message):
    with pytest.raises(ValueError, match=message):
        kernels.pack_nm(torch.randn(2, k), n, m)


def test_masks_are_counted_group_by_group():
    packed = kernels.pack_nm(torch.randn(3, 32))
    moved = kernels.unpack_bits(packed.mask, 32).roll(1, 1)
    assert wrong_mask(packed._replace(mask=kernels.pack_bits(moved))) == "groups of 4 that do not keep 2"


@pytest.mark.parametrize("rows", [1, 4096, 5000])
def test_gathering_is_the_gradient_of_unpacking(rows):
    packed, grad = kernels.pack_nm(torch.randn(rows, 72)), torch.randn(rows, 72)
    places = kernels.unpack_nm(packed._replace(values=torch.ones_like(packed.values))).bool()
    assert torch.equal(gather_nm(grad, packed.mask), grad[places].view(rows, 36))
    with pytest.raises(ValueError, match=r"gather_nm takes a matrix \[R, K\] and a uint8 mask \[R, K/8\], got"):
        gather_nm(grad[:, :64], packed.mask)


def test_every_way_has_its_reason(stand_in, dense_math, planned_for_gpu, monkeypatch):  # noqa: F811
    few, many = (linear_problem(tokens, 48, 32, BF16) for tokens in (1, 65))
    known = "until then, the time is that of reading the weight"
    reason = f"at most 64 tokens ({known})"
    assert plan_packed(few, CPU) == KERNEL._replace(reason=reason)
    plan = plan_packed(many, CPU)
    assert plan.is_sparse and plan.reason == f"more than 64 tokens ({known}); measured"
    plan = plan_packed(many._replace(m=40), CPU)
    assert plan == GemmPlan(DENSE, f"more than 64 tokens ({known}); cuSPARSELt needs multiples of 16, not 40 x 32")
    monkeypatch.undo()
    for problem in (few, many):
        plan = plan_packed(problem, CPU)
        reason = "Triton's kernels need a CUDA device, not cpu; cuSPARSELt needs a CUDA device, not cpu"
        assert plan.backend is DENSE and plan.reason.startswith(reason)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of inf and NaN
def test_the_kernel_gives_the_same_bits_each_time_and_keeps_what_is_not_finite(has_kernels):
    weight, x = kernels.nm_prune(torch.randn(40, 2080)).to(BF16), torch.randn(3, 2080).to(BF16)
    weight[3, :2], weight[3, 2:4], x[1, 5], x[2, 2079] = torch.tensor([INF, 1.0]), 0, INF, float("nan")
    packed = kernels.pack_nm(weight)
    results = [kernels.packed_linear(x, packed) for _ in range(2)]
    expected = F.linear(x.double(), weight.double())
    assert torch.equal(results[0].nan_to_num(7), results[1].nan_to_num(7))
    assert torch.equal(results[0].isnan(), expected.isnan()) and torch.equal(results[0].isinf(), expected.isinf())
    assert results[0][1].isnan().any()  # inf times a weight that was pruned, as in dense math
    torch.testing.assert_close(results[0][0], expected[0].to(BF16))


def test_operands_at_odd_addresses_and_of_odd_strides(has_kernels):
    weight, x = kernels.nm_prune(torch.randn(24, 64)).to(BF16), torch.randn(64, 5).to(BF16).t()
    parts = kernels.pack_nm(weight)[:2]
    odd = Packed(*(torch.cat([part.flatten()[:1], part.flatten()])[1:].view(part.shape) for part in parts))
    columns = Packed(*(part.t().contiguous().t() for part in parts))
    for packed in (odd, columns):
        result = kernels.packed_linear(x, packed, torch.ones(48).to(BF16)[::2])
        torch.testing.assert_close(result, (F.linear(x.float(), weight.float()) + 1).to(BF16))
        assert result.is_contiguous()


def test_the_backend_takes_packed_weights_of_linear_layers():
    with pytest.raises(ValueError, match="backend='packed' takes packed weights: pack_nm makes them"):
        compress(kernels.nm_prune(torch.randn(24, 40)), KERNEL)
    assert "in linear layers" in PACKED.plan(mm_problem(24, 3, 40, BF16), CPU, False)


@pytest.mark.parametrize("with_kernels", [False, True])
def test_it_compiles_in_one_graph_for_few_tokens_and_for_many(with_kernels, request, monkeypatch):
    if with_kernels:
        request.getfixturevalue("has_kernels")
    monkeypatch.setattr(packed_gemm, "FEW_TOKENS", 8)
    packed, bias = kernels.pack_nm(torch.randn(16, 32)), torch.randn(16)
    compiled = torch.compile(kernels.packed_linear, fullgraph=True, backend="aot_eager")
    for tokens in (1, 4, 20, 30):
        x = torch.randn(tokens, 32)
        torch.testing.assert_close(compiled(x, packed, bias), F.linear(x, kernels.unpack_nm(packed), bias))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 8), (3, 128), (4, 136), (2, 3, 264), (0, 16), (2, 0, 8)])
def test_int8_values_are_the_nearest_steps_of_their_scale(shape, dtype):
    """Against the definition, element by element: a scale of each 128, its product rounded once."""
    weight = kernels.nm_prune(torch.randn(shape)).to(dtype)
    weight[..., :1, 4:] = 0  # a group of zeros, where there is more than one
    packed = kernels.pack_nm(weight)
    values, mask, scales, _ = int8 = kernels.quantize_packed(packed)
    assert values.dtype == torch.int8 and mask is packed.mask and int8.dtype == scales.dtype == dtype
    assert scales.shape == (*shape[:-1], -(-shape[-1] // 128)) and (scales >= 0).all()
    dense = kernels.unpack_nm(int8)
    assert dense.dtype == dtype and dense.shape == shape and not torch.signbit(dense[dense == 0]).any()
    each = scales.double().repeat_interleave(128, -1)[..., : shape[-1]]
    exact = torch.where(each > 0, (weight.double() / each).round().clamp(-127, 127) * each, 0)
    assert torch.equal(dense, exact.float().to(dtype) if dtype != torch.float64 else exact)
    groups = values.abs().float().split(64, -1)
    assert all(((group.amax(-1) >= 126) | (group == 0).all(-1)).all() for group in groups)
    assert kernels.quantize_packed(int8) is int8


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16, torch.float16])
def test_what_is_rounded_already_is_found_again(dtype):
    """For every mantissa that a scale of 16 bits may have."""
    largest = torch.linspace(1, 2, 4097)[:, None] * torch.tensor([[1.0, 0.5, -0.25, 0.001, 0.3, -0.9, 0.7, 0.1]])
    packed = kernels.quantize_packed(kernels.pack_nm(kernels.nm_prune(largest.to(dtype))))
    assert (packed.values.abs().amax(-1) == 127).all()
    again = kernels.quantize_packed(kernels.pack_nm(kernels.unpack_nm(packed)))
    assert torch.equal(again.scales, packed.scales) and torch.equal(again.values, packed.values)


def test_scales_at_the_ends_of_a_dtype():
    """Tiny values keep a scale that is not 0 and does not cut them off; huge ones stay finite."""
    for largest in (1.2e-7, 1e-5, 178 * 2**-24, 1e-3):
        weight = torch.tensor([[largest / 2, 0, 0, -largest, 0, 0, 0, 0]], dtype=torch.float16)
        int8 = kernels.quantize_packed(kernels.pack_nm(weight))
        assert (kernels.unpack_nm(int8) - weight).abs().max() <= int8.scales * 0.5001
    for dtype in (torch.float32, BF16, torch.float16):
        weight = torch.tensor([[1.0, 0, 0, -1, 0, 0, 0, 0]]).to(dtype) * torch.finfo(dtype).max
        dense = kernels.unpack_nm(kernels.quantize_packed(kernels.pack_nm(weight)))
        assert (
            torch.equal(dense.sign(), weight.sign()) and (dense.double() / weight.double()).nan_to_num(1).min() > 0.99
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BF16, torch.float16])
def test_int8_values_in_a_linear_layer(dtype, dense_math):
    """Every plan computes with the matrix that `unpack_nm` gives, in the dtype of the scales, compiled too."""
    packed = kernels.quantize_packed(kernels.pack_nm(kernels.nm_prune(torch.randn(24, 264)).to(dtype)))
    torch.compiler.reset()  # each dtype is compiled again
    bias, compiled = torch.randn(24).to(dtype), torch.compile(kernels.packed_linear, fullgraph=True, backend="eager")
    for x in (torch.randn(2, 3, 264).to(dtype), torch.randn(264).to(dtype), torch.randn(0, 264).to(dtype)):
        expected = F.linear(x, kernels.unpack_nm(packed), bias)
        for plan in (None, KERNEL, GemmPlan(DENSE, "requested")):
            assert torch.equal(kernels.packed_linear(x, packed, bias, plan=plan), expected)
        assert torch.equal(compiled(x, packed, bias), expected)


def test_no_kernel_for_gpus_reads_int8_values(stand_in, planned_for_gpu):  # noqa: F811
    """A plan for a GPU says so; what the GPU's package has in their place is right all the same."""
    few = linear_problem(1, 48, 32, BF16)._replace(is_int8=True)
    assert PACKED.plan(few, torch.device("cuda"), False) == "no kernel for GPUs reads packed 2:4 of int8"
    assert plan_packed(few, CPU).backend is PACKED
    weight, x = kernels.nm_prune(torch.randn(48, 32)).to(BF16), torch.randn(3, 32).to(BF16)
    packed = kernels.quantize_packed(kernels.pack_nm(weight))
    dense = kernels.unpack_nm(packed)
    assert torch.equal(gpu.packed.unpack_nm(*packed), dense)
    assert torch.equal(gpu.packed.packed_linear(x, *packed, None), F.linear(x, dense))
    plan = plan_packed(few._replace(n=65), CPU)
    assert plan.is_sparse and plan.reason.startswith("more than 64 tokens")
    many = torch.randn(80, 32).to(BF16)
    torch.testing.assert_close(kernels.packed_linear(many, packed, plan=plan), F.linear(many, dense))
