"""The kernels for CPUs that prune, bit for bit against the reference, on every path that this CPU runs."""

from unittest.mock import patch

import hypothesis.strategies as st
import pytest
import sparse24_kernels as kernels
import torch
from hypothesis import given, settings
from sparse24_kernels import cpu, dispatch, hard_problems, reference
from sparse24_kernels.cpu import prune
from sparse24_kernels.cpu.library import load
from sparse24_kernels.operators import Pruning

LIBRARY = load()
SAME = ("amx", "avx512_bf16")  # prune as avx512 does
PATHS = [] if isinstance(LIBRARY, str) else [path for path in LIBRARY.paths if path not in SAME]
CPU = torch.device("cpu")
DTYPES = dispatch.KERNEL_DTYPES
pytestmark = pytest.mark.skipif(isinstance(LIBRARY, str), reason=str(LIBRARY))
every_path = pytest.mark.parametrize("path", PATHS)


def equal_to_reference(operator: str, *arguments) -> None:
    assert hard_problems.compare(operator, getattr(cpu.OPERATORS, operator), arguments) == ""


@every_path
@pytest.mark.parametrize("operator", [name for name, f in vars(cpu.OPERATORS).items() if f is not None])
def test_kernels_equal_the_reference(operator, path):
    with patch.object(LIBRARY, "path", path):
        for dtype in DTYPES:
            assert hard_problems.first_difference(operator, getattr(cpu.OPERATORS, operator), CPU, dtype) == ""


@every_path
def test_small_fp16_numbers_survive_where_fp32_flushes_its_own(path):
    weight = torch.tensor([3e-5, -6e-8, 6e-5, 1e-7], dtype=torch.float16)
    with patch.object(LIBRARY, "path", path):
        expected = kernels.nm_prune(weight)
        assert torch.set_flush_denormal(True)
        try:
            assert torch.equal(kernels.nm_prune(weight), expected) and expected.count_nonzero() == 2
        finally:
            torch.set_flush_denormal(False)


@every_path
@pytest.mark.parametrize("byte", [2, 127, 128, 255])
def test_every_byte_but_0_is_a_bool_that_is_true(path, byte):
    """Views and files have others than 1, which no operation of torch writes."""
    weight, mask = torch.randn(8, 36), torch.rand(8, 36) > 0.5
    odd = (mask.to(torch.uint8) * byte).view(torch.bool)
    with patch.object(LIBRARY, "path", path):
        assert torch.equal(kernels.apply_mask(weight, odd), weight * mask)
        for form, x in (("packed", torch.randn(32, 64)), ("packed-transposed", torch.randn(32, 64))):
            keep = kernels.nm_mask(x, dim=-1 if form == "packed" else 0)
            same = (keep.to(torch.uint8) * byte).view(torch.bool)
            assert torch.equal(*(kernels.prune.prune_forms(x, [form], "mask", mask=each)[0] for each in (keep, same)))
        decayed = [torch.zeros(8, 36), torch.zeros(8, 36)]
        for grad, each in zip(decayed, (mask, odd)):
            kernels.masked_decay_(grad, weight, each, 0.5)
        assert torch.equal(*decayed)


def test_they_are_chosen():
    for operator, function in vars(cpu.OPERATORS).items():
        choice = dispatch.choose_kernels(CPU, operator=operator)
        assert choice.implementation == ("reference" if function is None else "cpu")
    assert choice.reason.startswith("C++ kernels")


@st.composite
def tensors(draw_, multiple: int, dims: tuple[int, ...] = (1, 2, 3)) -> tuple[torch.Tensor, int]:
    """Any sizes around a block of 64 groups, a dimension that `multiple` divides, any values and strides."""
    count = draw_(st.sampled_from(dims))
    dim = draw_(st.integers(0, count - 1))
    shape = [draw_(st.integers(0, 9) | st.sampled_from([63, 66, 130])) for _ in range(count)]
    shape[dim] = multiple * draw_(st.integers(0, 5) | st.sampled_from([63, 65, 129]))
    generator = torch.Generator().manual_seed(draw_(st.integers(0, 2**31)))
    order = draw_(st.permutations(range(count)))
    x = torch.randn([shape[i] for i in order], generator=generator) * 10.0 ** draw_(st.integers(-42, 38))
    values = torch.tensor([0, -0.0, 1, -1, 2, 1e-45, -1e-38, 3e38, -torch.inf, torch.nan, 65504.0, 6e-8, -6e-5])
    chosen = values[torch.randint(len(values), x.shape, generator=generator)]
    share = draw_(st.sampled_from([0.0, 0.05, 1.0]))
    x = torch.where(torch.rand(x.shape, generator=generator) < share, chosen, x)
    x = x.to(draw_(st.sampled_from(DTYPES))).permute([order.index(i) for i in range(count)])
    return (x.repeat_interleave(2, 0)[::2] if draw_(st.booleans()) else x), dim


paths = st.sampled_from(PATHS or [""])


@given(st.data(), paths, st.sampled_from(DTYPES), st.integers(-(2**63), 2**63 - 1), st.booleans())
@pytest.mark.parametrize("rule", ["nm-mask", "transposable", "magnitude", "soft-threshold", "mask", "mvue"])
@settings(max_examples=40, deadline=None)
def test_anything(rule, data, path, dtype, number, flag):
    dims = (2,) if rule == "transposable" else (1, 2, 3)
    x, dim = data.draw(tensors(1 if rule in ("mask", "mvue") else 4, dims))
    form = "transposed" if flag and x.dim() == 2 else "dense"
    with patch.object(LIBRARY, "path", path):
        if rule == "nm-mask":
            equal_to_reference("nm_mask", x, 2, 4, dim, flag)
        elif rule == "transposable":
            equal_to_reference("transposable_mask", x.repeat(4, 1) if dim else x.repeat(1, 4), 2, 4, "exact", flag)
        elif rule == "mvue":
            equal_to_reference("mvue", x, torch.tensor(number), 2, 4, dim, "exact", form)
        elif rule == "mask":
            mask = torch.randn(x.shape, generator=torch.Generator().manual_seed(x.numel())) > 0.3
            mask = mask.mT.contiguous().mT if number % 2 and x.dim() > 1 else mask
            mask = reference.masks.pack_bits(mask) if flag else mask
            equal_to_reference("prune", x, Pruning("mask", dim=x.dim() - 1, mask=mask, dtype=dtype))
        else:
            scale = torch.tensor(-1.7).to(dtype) if rule == "soft-threshold" else None
            equal_to_reference("prune", x, Pruning(rule, 2, 4, dim, None, scale, dtype, [form]))


@every_path
def test_any_number_of_threads_gives_the_same_bits(path):
    weight, key = torch.randn(516, 392), torch.tensor(5)
    mask = kernels.transposable_mask(weight, packed=True)

    def everything() -> list[torch.Tensor]:
        made = [kernels.mvue(weight[:511, :390], dim=dim, key=key) for dim in (0, 1)]
        made += [kernels.nm_mask(weight, dim=dim, packed=True) for dim in (0, 1)]
        made += [kernels.soft_threshold(weight, dim=dim) for dim in (0, 1)]
        return [*made, kernels.apply_mask(weight, mask), kernels.transposable_mask(weight)]

    before = torch.get_num_threads()
    with patch.object(LIBRARY, "path", path):
        alone = everything()
        try:
            for threads in (2, 3, 7):
                torch.set_num_threads(threads)
                for found, expected in zip(everything(), alone, strict=True):
                    assert torch.equal(found, expected), threads
        finally:
            torch.set_num_threads(before)


@given(paths, tensors(1), st.booleans(), st.booleans(), st.floats(-1e4, 1e4), st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_decay_of_anything(path, of, bits, itself, alpha, kind):
    weight = of[0] if kind == 3 else of[0].float()
    grad = torch.randn(weight.shape) * 10.0 ** (10 * kind - 10)
    mask = torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())) > 0.3
    mask = reference.masks.pack_bits(mask) if bits else mask
    ours, theirs = ((weight.clone(), None) if itself else (grad.clone(), weight) for _ in range(2))
    with patch.object(LIBRARY, "path", path):
        prune.masked_decay_(ours[0], ours[0] if itself else weight, mask, alpha)
    reference.masks.masked_decay_(theirs[0], theirs[0] if itself else weight, mask, alpha)
    assert not hard_problems.difference(ours[0], theirs[0], theirs[0])


@pytest.mark.skipif(PATHS == ["portable"], reason="no fused multiply-add")
def test_decay_runs_in_its_kernel(monkeypatch):
    ran, run = [], prune.run
    monkeypatch.setattr(prune, "run", lambda rule, *others, **named: ran.append(rule) or run(rule, *others, **named))
    kernels.masked_decay_(torch.zeros(8, 8), torch.randn(8, 8), torch.ones(8, 8, dtype=torch.bool), 0.5)
    assert ran == ["decay"]


def test_decay_is_seen_by_autograd():
    grad, weight, mask = torch.ones(8), torch.ones(8, requires_grad=True), torch.zeros(8, dtype=torch.bool)
    with torch.no_grad():
        kernels.masked_decay_(grad, weight, mask, 0.5)
    assert grad._version == 1 and grad.tolist() == [1.5] * 8
    kernels.masked_decay_(grad, weight, mask, 0.5)  # the reference, which autograd follows
    grad.sum().backward()
    assert weight.grad.tolist() == [0.5] * 8
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        kernels.masked_decay_(weight, grad.detach(), mask, 0.5)
    strided, of = torch.zeros(4, 6).t(), torch.arange(24.0).view(6, 4)
    kernels.masked_decay_(strided, of, torch.zeros(6, 4, dtype=torch.bool), 2.0)
    assert torch.equal(strided, 2 * of)


def test_what_the_kernels_do_not_take_is_the_references():
    x, key = torch.randn(16, 24), torch.tensor(3)
    for arguments in ((1, 2, 0, "exact", "dense"), (2, 4, 1, "approx", "dense")):
        equal_to_reference("mvue", x, key, *arguments)
    equal_to_reference("prune", x, Pruning("magnitude", dim=1, dtype=torch.float64))
    equal_to_reference("prune", x.repeat(8, 3), Pruning("magnitude", 3, 72, 1))
    equal_to_reference("nm_mask", x.repeat(8, 3), 3, 72, 1, False)
    wide = x.double()
    assert torch.equal(kernels.nm_prune(wide), wide * reference.masks.nm_mask(wide, 2, 4, 1, False))
    assert torch.equal(kernels.apply_mask(x[0, 0], torch.tensor(True)), x[0, 0])
