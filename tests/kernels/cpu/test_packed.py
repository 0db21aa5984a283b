"""GEMMs with packed weights by every path of this CPU, against fp64, and as PyTorch calls them.

The bounds are those of the arithmetic: a sum of n products in fp32 is off by at most n 2^-24 of the sum of magnitudes,
the result by half a unit of its dtype; a weight that is rounded, or an x in 8 bits, by half a step of each.
"""

import multiprocessing
import threading
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import sparse24_kernels as kernels
import torch
from sparse24_kernels import Packed
from sparse24_kernels.cpu import packed as operators
from sparse24_kernels.cpu.library import load
from sparse24_kernels.dispatch import choose_kernels
from torch import Tensor
from torch.nn import functional as F

BF16, INF, NAN = torch.bfloat16, float("inf"), float("nan")
DTYPES = [torch.float32, BF16, torch.float16]
LIBRARY = load()
PATHS = [] if isinstance(LIBRARY, str) else list(LIBRARY.paths)
pytestmark = pytest.mark.skipif(not PATHS, reason=str(LIBRARY))
TOKENS, ROWS = 300, 130
FEW = {"portable": 2, "neon": 2, "avx2": 4, "avx512": 8, "avx512_bf16": 4, "amx": 2}
"""Tokens up to which each is multiplied by itself."""
PATTERNS = [(2, 4), (16, 32), (6, 8), (31, 64)]


def is_rounded(path: str, dtype: torch.dtype, int8: bool, tokens: int) -> bool:
    """Whether x is rounded to 8 bits."""
    return int8 and path in ("avx512_bf16", "amx") and tokens <= (4 if path == "amx" and dtype == BF16 else 8)


@pytest.fixture(params=PATHS)
def path(request):
    with patch.object(LIBRARY, "path", request.param):
        yield request.param


@cache
def operands(dtype: torch.dtype, k: int, int8: bool, n: int = 2, m: int = 4) -> tuple[Tensor, Packed, Tensor]:
    """x `[TOKENS, k]`, a packed `[ROWS, k]` with magnitudes that differ, and a bias."""
    generator = torch.Generator().manual_seed(k)
    x, weight = (torch.randn(n, k, generator=generator) for n in (TOKENS, ROWS))
    weight *= torch.rand(ROWS, 1, generator=generator) * 4
    packed = kernels.pack_nm(weight.to(dtype), n, m)
    bias = torch.randn(ROWS, generator=generator).to(dtype)
    return x.to(dtype), kernels.quantize_packed(packed) if int8 else packed, bias


def exact(packed: Packed) -> Tensor:
    """The weight in fp64; of int8 values the product with their scale, not rounded."""
    if packed.scales is None:
        return kernels.unpack_nm(packed._replace(values=packed.values.double()))
    return kernels.unpack_nm(packed._replace(scales=packed.scales.double()))


def of_rows(packed: Packed, rows: Any) -> list[Any]:
    return [part[rows] if isinstance(part, Tensor) else part for part in packed]


@cache
def expected(dtype: torch.dtype, k: int, int8: bool, pattern: Any, x_in_8_bits: bool) -> tuple[Tensor, Tensor]:
    """The product without bias in fp64, and how far off it may be before it is rounded."""
    x, packed, _ = operands(dtype, k, int8, *pattern)
    x, weight = x.double(), exact(packed)
    sizes = F.linear(x.abs(), weight.abs())
    error = sizes * (k + 2) * 2**-24
    if int8:
        error += sizes * torch.finfo(dtype).eps / 2
    if x_in_8_bits:
        steps = torch.stack([group.abs().amax(-1) for group in x.split(128, -1)], -1) / 127
        error += F.linear(steps / 2, torch.stack([group.abs().sum(-1) for group in weight.split(128, -1)], -1)) * 1.001
    return F.linear(x, weight), error


@pytest.mark.parametrize("int8", [False, True], ids=["floating", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_products(path, dtype, int8, pattern):
    for k in (-(-k // pattern[1]) * pattern[1] for k in (8, 72, 136, 520, 4104)):
        x, packed, bias = operands(dtype, k, int8, *pattern)
        for count, tokens in enumerate((0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 40, 64, 65, 130, 300)):
            if k > 4000 and tokens not in (1, 3, 8, 17, 65):
                continue
            rows = (1, 2, 3, 5, 31, 33, 129)[(count + k) % 7]
            part, with_bias = of_rows(packed, slice(rows)), bool((count + k // 8) % 2)
            y = operators.packed_linear(x[:tokens], *part, bias[:rows] if with_bias else None)
            x_in_8_bits = is_rounded(path, dtype, int8, tokens)
            product, error = (tensor[:tokens, :rows] for tensor in expected(dtype, k, int8, pattern, x_in_8_bits))
            product = product + bias[:rows].double() if with_bias else product
            unit = torch.finfo(dtype)
            allowed = error * 1.01 + product.abs() * unit.eps / 2 + unit.smallest_normal * unit.eps
            assert y.dtype == dtype and y.shape == product.shape
            assert bool(((y.double() - product).abs() <= allowed).all()), (k, tokens, rows, with_bias)


@pytest.mark.parametrize("int8", [False, True], ids=["floating", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", [(2, 4), (6, 8)])
def test_more_rows_and_tokens_than_are_multiplied_at_once(path, dtype, int8, pattern):
    """Each row and token as where they are few."""
    x, packed, bias = operands(dtype, 136, int8, *pattern)
    rows, tokens = torch.randint(ROWS, (600,)), torch.randint(TOKENS, (530,))
    y = operators.packed_linear(x[tokens], *of_rows(packed, rows), bias[rows])
    few = operators.packed_linear(x, *packed, bias)
    assert torch.equal(y, few[tokens][:, rows])


@pytest.mark.parametrize("int8", [False, True], ids=["floating", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", [(2, 4), (16, 32)])
def test_the_same_bits_for_any_number_of_threads_and_any_other_tokens(path, dtype, int8, pattern):
    x, packed, bias = operands(dtype, 544, int8, *pattern)
    few = FEW["avx512"] if dtype != BF16 and path in ("avx512_bf16", "amx") else FEW[path]
    results = {}
    try:
        for threads in (1, 2, 3, 2, 1):
            torch.set_num_threads(threads)
            for tokens in (*range(1, few + 1), 40, 130):
                y = operators.packed_linear(x[:tokens], *packed, bias)
                assert torch.equal(y, results.setdefault(tokens, y))
    finally:
        torch.set_num_threads(1)
    for tokens in range(1, few + 1):
        assert torch.equal(results[tokens], results[few][:tokens])
        last = operators.packed_linear(x[few - tokens : few], *packed, bias)
        assert torch.equal(last, results[few][few - tokens :])


@pytest.mark.parametrize("tokens", [2, 7, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_shows_where_it_is(path, dtype, tokens):
    x, packed, _ = operands(dtype, 136, False)
    x, values = x[:tokens].clone(), packed.values.clone()
    x[1, 3], values[5, 1], values[6, 67] = INF, NAN, -INF
    kept = exact(packed)[:, 3] != 0
    y = operators.packed_linear(x, *packed._replace(values=values), None)
    assert not y[1, kept].isfinite().any() and y[:, 5].isnan().all() and not y[:, 6].isfinite().any()
    y[1, :], y[:, 5:7] = 0, 0
    assert y.isfinite().all()
    int8 = operands(dtype, 136, True)[1]
    scales = int8.scales.clone()
    x[0, 135], scales[7, 1] = NAN, INF
    y = operators.packed_linear(x, *int8._replace(scales=scales), None)
    assert not y[1, kept].isfinite().any() and not y[:, 7].isfinite().any()
    assert y[0, exact(packed)[:, 135] != 0].isnan().all()
    y[:2], y[:, 7] = 0, 0
    assert y.isfinite().all()


def test_results_that_overflow_are_inf_and_small_ones_stay(path):
    ones = kernels.pack_nm(torch.ones(3, 64, dtype=torch.float16))
    for tokens in (1, 40):
        y = kernels.packed_linear(torch.full((tokens, 64), 3000.0, dtype=torch.float16), ones)
        assert (y == INF).all()
        y = kernels.packed_linear(torch.full((tokens, 64), 6e-8, dtype=torch.float16), ones)
        assert (y == torch.tensor(32 * 2.0**-24, dtype=torch.float16)).all()


@pytest.mark.parametrize("tokens", [3, 40])
def test_operands_at_odd_addresses_and_of_odd_strides(path, tokens):
    def odd(tensor):
        return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)

    def columns(tensor):
        return tensor.t().contiguous().t()

    for dtype in DTYPES:
        for int8 in (False, True):
            x, packed, bias = operands(dtype, 136, int8)
            x = x[:tokens]
            y = kernels.packed_linear(x, packed, bias)
            for change in (odd, columns):
                part = Packed(*(change(part) if isinstance(part, Tensor) else part for part in packed))
                every_second = bias.repeat_interleave(2)[::2]
                assert torch.equal(kernels.packed_linear(change(x), part, every_second), y)
                assert torch.equal(kernels.unpack_nm(part), kernels.unpack_nm(packed))
            one = x[:1].expand(tokens, -1)
            assert torch.equal(kernels.packed_linear(one, packed), kernels.packed_linear(one.contiguous(), packed))


X, WEIGHT, BIAS = torch.randn(3, 16), kernels.pack_nm(torch.randn(8, 16)), torch.randn(8)
INT8 = kernels.quantize_packed(WEIGHT)


@pytest.mark.parametrize(
    "arguments",
    [
        (X[:, :8], *WEIGHT, None),
        (X[0], *WEIGHT, None),
        (X.half(), *WEIGHT, None),
        (X, *WEIGHT._replace(values=WEIGHT.values[:, :6]), None),
        (X, *WEIGHT._replace(values=WEIGHT.values[0], mask=WEIGHT.mask[0]), None),
        (X, *WEIGHT._replace(mask=WEIGHT.mask[:7]), None),
        (X, *WEIGHT._replace(mask=WEIGHT.mask.to(torch.int8)), None),
        (X, *WEIGHT._replace(m=32), None),
        (X, *WEIGHT, BIAS[:7]),
        (X, *WEIGHT, BIAS.half()),
        (X, *WEIGHT._replace(scales=INT8.scales), None),
        (X, *INT8._replace(scales=None), None),
        (X, *INT8._replace(scales=INT8.scales[:7]), None),
        (X, *INT8._replace(scales=INT8.scales.half()), None),
        (X, *WEIGHT._replace(values=WEIGHT.values.to("meta")), None),
        (X, *WEIGHT, BIAS.to("meta")),
    ],
)
def test_the_operator_reads_nothing_that_does_not_fit(arguments):
    # The dispatcher computes sizes of others alone.
    on_cpu = all(tensor.is_cpu for tensor in arguments if isinstance(tensor, Tensor))
    for call in (operators.packed_linear, torch.ops.sparse24.packed_linear) if on_cpu else (operators.packed_linear,):
        with pytest.raises(ValueError, match=r"do not fit each other|packed weight"):
            call(*arguments)


def test_the_kernels_run_and_are_traced_by_everything():
    """What traces has the operator, and no result of one call."""
    assert choose_kernels(X.device, X.dtype, "packed_linear").implementation == "cpu"
    other = torch.randn(3, 16)
    wanted = kernels.packed_linear(other, WEIGHT, BIAS)
    compiled = torch.compile(lambda x: kernels.packed_linear(x, WEIGHT, BIAS), fullgraph=True, backend="aot_eager")
    module = torch.nn.Module()
    module.forward = lambda x: kernels.packed_linear(x, WEIGHT, BIAS)
    for traced in (
        compiled,
        torch.fx.experimental.proxy_tensor.make_fx(lambda x: kernels.packed_linear(x, WEIGHT, BIAS))(X),
        torch.export.export(module, (X,)).module(),
    ):
        assert torch.equal(traced(X), kernels.packed_linear(X, WEIGHT, BIAS))
        assert torch.equal(traced(other), wanted)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(kernels.packed_linear(other + 0, WEIGHT, BIAS), wanted)


def test_threads_of_python_share_a_weight():
    x, packed, bias = operands(BF16, 520, False)
    wanted, wrong = [kernels.packed_linear(x[:tokens], packed, bias) for tokens in (1, 40)], []

    def work(seed):
        for count in range(20):
            torch.set_num_threads(1 + (seed + count) % 3)  # as a server might
            wrong.extend(not torch.equal(kernels.packed_linear(x[: len(y)], packed, bias), y) for y in wanted)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(1)
    assert len(wrong) == 8 * 40 and not any(wrong)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_after_a_fork():
    """As the workers of a DataLoader have it: torch's threads are the parent's, and one is left."""
    x, packed, bias = operands(BF16, 520, False)
    wanted = kernels.packed_linear(x, packed, bias)

    def child(pipe):
        torch.set_num_threads(1)
        pipe.send(torch.equal(kernels.packed_linear(x, packed, bias), wanted))

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
    process.start()
    assert ours.poll(60) and ours.recv()
    process.join(60)
    assert process.exitcode == 0
