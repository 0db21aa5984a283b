"""The form that Hopper's sparse tensor cores take, which pruning writes in the library's place."""

import hashlib

import cslt
import pytest
import torch
from gpu_layers import linear, patched
from sparse24_kernels import mvue, pack_nm, reference
from sparse24_kernels.dispatch import Choice
from sparse24_kernels.gemm import compress, cusparselt, sparse_backends
from sparse24_kernels.hard_problems import difference
from sparse24_kernels.prune import prune_forms
from torch import Tensor

from recipes.benchmarks.cases import draw

CPU, CUDA, BF16 = torch.device("cpu"), torch.device("cuda", 0), torch.bfloat16
TWO_OF_FOUR = [(1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1), (0, 1, 1, 0), (0, 1, 0, 1), (0, 0, 1, 1)]


class Hopper(cslt.StandIn):
    """The library on compute capability 9.0."""

    def compress(self, matrix):
        self.compressed += 1
        return reference.packed.for_sm90(matrix)

    def matmul(self, compressed, dense, bias=None, *, transpose_result=False, **more):
        matrix = expanded(compressed, len(dense))
        self.gemms.append(matrix.shape)
        return torch.nn.functional.linear(dense.t(), matrix, bias) if transpose_result else matrix @ dense


def expanded(compressed: Tensor, k: int) -> Tensor:
    """The 2:4 matrix `[m, k]`."""
    m = len(compressed)
    values, places = compressed.reshape(-1).split([m * k // 2, m * k // 16])
    row, group = torch.arange(m)[:, None], torch.arange(k // 4)[None, :]
    at = (row // 64 * (k // 32) + group // 8) * 512 + row // 16 % 4 * 128 + row % 8 * 16 + row // 8 % 2
    at = at + (group & 1) * 4 + (group & 2) * 4 + (group & 4) // 2
    halves = torch.stack([places.view(torch.uint8) & 15, places.view(torch.uint8) >> 4], -1).view(-1)[at.view(-1)]
    index = torch.stack([halves & 3, halves >> 2], -1).long()
    return torch.zeros(m * k // 4, 4, dtype=values.dtype).scatter_(1, index, values.view(-1, 2)).view(m, k)


@pytest.fixture
def hopper(monkeypatch):
    """A GPU that runs every GEMM by the library, and kernels that write its form."""
    monkeypatch.setattr(sparse_backends, "kernels_compress", lambda device, dtype: True)
    cslt.install(monkeypatch, library := Hopper())
    monkeypatch.setattr(cusparselt, "MULTIPLE", 64)
    return library


@pytest.mark.parametrize(
    ("m", "k", "draws", "found"),
    [
        (64, 64, 64, "6e52a4093b46c2508b9aebc553a2ef90"),
        (384, 640, 40, "488f293e04551890c2345446aa781215"),
        (512, 1024, 40, "899ca80823cfd3034149b06cb12604d2"),
    ],
)
def test_it_is_what_cusparselt_makes_on_an_h100(m, k, draws, found):
    """Of ones in random places. Found on an H100 80GB HBM3 with cuSPARSELt 0.8.0 and torch 2.11."""
    which = torch.randint(6, (draws, m, k // 4), generator=torch.Generator().manual_seed(m * k))
    digest = hashlib.sha256()
    for matrix in torch.tensor(TWO_OF_FOUR, dtype=BF16)[which].view(draws, m, k):
        digest.update(reference.packed.for_sm90(matrix).view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest()[:32] == found


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_it_keeps_every_value_whatever_a_group_has(dtype):
    matrix = torch.randn(64, 128).to(dtype) * (torch.rand(64, 128) < 0.5)
    dense, compressed = prune_forms(matrix, ["dense", "sm90"])
    assert not difference(expanded(compressed, 128), dense, dense)
    transposed, compressed = prune_forms(matrix, ["transposed", "sm90-transposed"], dim=0)
    assert not difference(expanded(compressed, 64), transposed, transposed)
    estimates = [mvue(matrix, dim=0, key=3, form=form) for form in ("transposed", "sm90-transposed")]
    assert not difference(expanded(estimates[1], 64), estimates[0], estimates[0])


@pytest.mark.parametrize("method", ["s-ste", "t-sr-ste"])
def test_layers_prune_into_it(method, hopper):
    tokens, inputs, out = 64, 128, 192
    x, grad = (draw(CPU, (tokens, size), BF16, seed=size) for size in (inputs, out))

    def results(backend: str) -> list[Tensor]:
        layer = patched(linear(inputs, out, True, CPU), method, backend)
        output = layer(x.requires_grad_())
        return [output.detach(), *torch.autograd.grad(output, [x, *layer.parameters()], grad)]

    for ours, dense in zip(results("cusparselt"), results("dense")):
        torch.testing.assert_close(ours, dense)
    assert len(hopper.gemms) == 2 + (method == "t-sr-ste")
    assert not hopper.compressed


def test_a_packed_or_pruned_matrix_is_compressed_by_it_too(hopper):
    plan, matrix = cslt.sparse_plan(), prune_forms(torch.randn(64, 128).bfloat16(), ["dense"])[0]
    for given in (matrix, pack_nm(matrix), matrix.t().contiguous().t()):
        assert torch.equal(compress(given, plan).values, reference.packed.for_sm90(matrix))
    assert not hopper.compressed


@pytest.mark.parametrize(
    ("change", "expected"),
    [({}, True), ({"capability": (8, 0)}, False), ({"wrong": "differs"}, False), ({"kernels": "reference"}, False)],
    ids=["right", "another GPU", "another layout", "no kernels"],
)
def test_kernels_compress_where_the_library_does_the_same(change, expected, monkeypatch):
    given = {"capability": (9, 0), "wrong": "", "kernels": "triton"} | change
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: given["capability"])
    monkeypatch.setattr(sparse_backends, "stores_as_known", lambda device, dtype: not given["wrong"])
    monkeypatch.setattr(sparse_backends, "choose_kernels", lambda device, dtype: Choice(given["kernels"], ""))
    sparse_backends._kernels_compress.cache_clear()
    assert sparse_backends.kernels_compress(CUDA, BF16) is expected
    sparse_backends._kernels_compress.cache_clear()
    assert not sparse_backends.kernels_compress(CPU, BF16) and not sparse_backends.kernels_compress(CUDA, torch.float32)


def test_another_layout_is_noticed(monkeypatch):
    cslt.install(monkeypatch, Hopper())
    assert sparse_backends.stores_as_known(CPU, BF16)
    cslt.install(monkeypatch, cslt.StandIn())
    assert not sparse_backends.stores_as_known(CPU, BF16)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["s-ste", "t-sr-ste"])
def test_a_layer_compiles_in_one_graph(method, hopper):
    layer = patched(linear(128, 192, True, CPU), method, "cusparselt")
    x = draw(CPU, (64, 128), BF16).requires_grad_()

    def call(forward) -> list[Tensor]:
        output = forward(x)
        return [output.detach(), *torch.autograd.grad(output.float().square().sum(), [x, *layer.parameters()])]

    torch._dynamo.reset()
    for ours, eager in zip(call(torch.compile(layer, fullgraph=True, backend="aot_eager")), call(layer)):
        torch.testing.assert_close(ours, eager)
    assert not hopper.compressed
