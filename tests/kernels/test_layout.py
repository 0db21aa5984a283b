"""The library's layout, found out by experiment on stand-ins that lay matrices out in different ways."""

from contextlib import nullcontext

import cslt
import pytest
import sparse24_kernels as kernels
import torch
from sparse24_kernels import cusparselt, layout

CPU = torch.device("cpu")
ORDERS = [cslt.row_major, cslt.tiles, cslt.ampere, cslt.hopper]
FORMS = ["compressed", "compressed-transposed"]


@pytest.fixture
def library(monkeypatch):
    """Install a stand-in; says how often the library was asked to compress since."""

    def install(order):
        stand_in = cslt.install(monkeypatch, cslt.StandIn(order=order))
        for size in ((64, 128), (128, 64)):
            layout.learn_layout(*size, torch.bfloat16, CPU)
        stand_in.compressed = 0
        return stand_in

    return install


def learned(m: int, k: int, dtype: torch.dtype = torch.bfloat16):
    layout.learn_layout(m, k, dtype, CPU)
    return layout.known_layout(m, k, dtype, CPU)


def weight_and_mask() -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(64, 128)
    weight[:8, :64] = 0.0  # groups with fewer than two non-zeros
    weight[8:12] *= torch.tensor([0.0, -0.0, 1.0, 0.0]).repeat(32)
    return weight, kernels.transposable_mask(weight, packed=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_unit_is_found(monkeypatch, order, dtype):
    stand_in = cslt.install(monkeypatch, cslt.StandIn(order=order))
    found = learned(64, 128, dtype)
    assert torch.equal((found.rows[:, None] + found.units).flatten(), stand_in.places(64, 128))
    assert found.rows.dtype == found.units.dtype == torch.int32
    asked = stand_in.compressed
    assert learned(64, 128, dtype) is found and stand_in.compressed == asked


@pytest.mark.parametrize("order", ORDERS)
def test_pruning_writes_what_the_library_would(library, order):
    stand_in = library(order)
    weight, mask = weight_and_mask()
    dense, *ours = kernels.prune_forms(weight, ["dense", *FORMS], "mask", mask=mask, dtype=torch.bfloat16)
    estimate = kernels.mvue(weight.bfloat16(), dim=0, key=3)
    ours.append(kernels.mvue(weight.bfloat16(), dim=0, key=3, form="compressed"))
    assert stand_in.compressed == 0
    for compressed, matrix in zip(ours, (dense, dense.t(), estimate.t())):
        x = torch.randn(16, matrix.shape[1]).bfloat16()
        assert compressed.dtype == torch.bfloat16 and compressed.shape == (len(matrix), matrix.shape[1] * 9 // 16)
        # Groups with fewer than two non-zeros can be written in several ways, so products are compared, not bits.
        product = kernels.sparse_linear(x, compressed, algorithm=cusparselt.Algorithm())
        assert torch.equal(product, torch.nn.functional.linear(x, matrix))
    full = torch.randn(64, 128).bfloat16()
    (compressed,) = kernels.prune_forms(full, ["compressed"])
    assert torch.equal(compressed.view(torch.int16), kernels.compress(kernels.nm_prune(full)).view(torch.int16))


def values_by_columns(flat, m, k):
    """A library that stores its values in another order."""
    flat[: m * k // 2] = flat[: m * k // 2].view(m, k // 2).t().flatten()


def units_of_another_order(flat, m, k):
    """A library whose units have their first group in the highest bits."""
    units = flat[m * k // 2 :].view(torch.int16)
    nibbles = [units >> 4 * i & 15 for i in range(4)]
    units[:] = sum(nibble << 4 * (3 - i) for i, nibble in enumerate(nibbles))


def constant(flat, m, k):
    flat.fill_(0)


def noise(flat, m, k):
    flat.view(torch.int16).random_(generator=torch.Generator().manual_seed(int(flat.float().sum()) % 100))


@pytest.mark.parametrize("strange", [values_by_columns, units_of_another_order, constant, noise])
def test_a_layout_of_another_kind_is_left_to_the_library(monkeypatch, strange):
    stand_in = cslt.install(monkeypatch, cslt.StandIn())

    def compress(matrix):
        result = stand_in.compress(matrix)
        strange(result.view(-1), *matrix.shape)
        return result

    monkeypatch.setattr(torch, "_cslt_compress", compress)
    assert learned(64, 128) is None
    weight = torch.randn(64, 128).bfloat16()
    (ours,) = kernels.prune_forms(weight, ["compressed"])
    assert torch.equal(ours.view(torch.int16), compress(kernels.nm_prune(weight)).view(torch.int16))


def test_a_padded_layout_is_left_to_the_library(monkeypatch):
    cslt.install(monkeypatch, cslt.StandIn(padding=1))
    assert learned(64, 128) is None
    assert kernels.prune_forms(torch.randn(64, 128).bfloat16(), ["compressed"])[0].shape == (64, 73)


def test_a_swizzled_layout_is_left_to_the_library(library):
    stand_in = library(cslt.swizzled)
    weight, mask = weight_and_mask()
    dense, compressed, transposed = kernels.prune_forms(
        weight, ["dense", *FORMS], "mask", mask=mask, dtype=torch.bfloat16
    )
    assert stand_in.compressed == 2
    for ours, matrix in ((compressed, dense), (transposed, dense.t())):
        assert torch.equal(ours.view(torch.int16), kernels.compress(matrix).view(torch.int16))
    kernels.mvue(dense, dim=1, form="compressed")
    assert stand_in.compressed == 5  # two of them to compare with


@pytest.mark.parametrize("step", ["_numbered", "_compressed_by_library", "_read"])
@pytest.mark.parametrize("calls", [1, 4])
def test_without_memory_for_an_experiment_the_library_does_it(monkeypatch, step, calls):
    stand_in = cslt.install(monkeypatch, cslt.StandIn())
    real, left = getattr(layout, step), [calls]

    def short_of_memory(*arguments):
        left[0] -= 1
        if not left[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*arguments)

    monkeypatch.setattr(layout, step, short_of_memory)
    fits = step == "_read" and calls == 4  # it is called three times
    with nullcontext() if fits else pytest.warns(UserWarning, match="no memory to find out how 32 x 32 matrices"):
        assert (learned(32, 32, torch.float16) is not None) == fits
    asked = stand_in.compressed
    (ours,) = kernels.prune_forms(torch.randn(32, 32).half(), ["compressed"])
    assert stand_in.compressed == asked + (not fits) and ours.dtype == torch.float16
    learned(32, 32, torch.float16)  # once is enough
    assert stand_in.compressed == asked + (not fits)


def test_only_so_many_sizes_are_looked_into(monkeypatch):
    stand_in = cslt.install(monkeypatch, cslt.StandIn())
    monkeypatch.setattr(layout, "MOST", 2)
    sizes = [(16, 16), (16, 32), (16, 48)]
    assert [learned(*size) is None for size in sizes] == [False, False, True]
    assert stand_in.compressed == 2 * 2 * layout.ROUNDS
    assert learned(*sizes[0]) is not None


def test_what_an_int32_cannot_number_is_left_to_the_library(monkeypatch):
    monkeypatch.setattr(layout, "_experiment", lambda *size: pytest.fail("looked into"))
    monkeypatch.setattr(layout, "_found", {})
    assert learned(2**16, 2**15) is None


def test_planning_a_product_learns_its_layout(monkeypatch):
    stand_in = cslt.install(monkeypatch, cslt.StandIn())
    assert kernels.plan_linear(32, 64, 128, torch.bfloat16, CPU) is not None
    assert layout.known_layout(64, 128, torch.bfloat16, CPU) is not None
    asked = stand_in.compressed
    kernels.prune_forms(torch.randn(64, 128).bfloat16(), ["compressed"])
    assert stand_in.compressed == asked
    kernels.mvue(torch.randn(64, 128).bfloat16(), form="compressed", dim=0)  # of a size that nobody planned
    assert stand_in.compressed == asked + 1
    assert kernels.plan_linear(32, 48, 128, torch.bfloat16, CPU, "reference") is None
    assert layout.known_layout(48, 128, torch.bfloat16, CPU) is None


def test_random_numbers_are_left_alone(monkeypatch):
    cslt.install(monkeypatch, cslt.StandIn())
    state = torch.get_rng_state()
    learned(32, 64)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("shape", "arguments", "message"),
    [
        ((64, 40), {}, "multiples of 16, not 64 x 40"),
        ((64, 64), {"dtype": torch.float32}, "the sparse products run in bf16 and fp16, not torch.float32"),
        ((64, 64), {"dim": 0}, "needs groups along dimension 1, and 'magnitude' has dim=0"),
        ((64, 64), {"n": 1}, "is for 2:4, not 1:4"),
        ((64, 64), {"forms": ["compressed", "packed"]}, "'compressed' and 'packed' do not go together"),
    ],
)
def test_what_cannot_be_compressed(monkeypatch, shape, arguments, message):
    cslt.install(monkeypatch, cslt.StandIn())
    with pytest.raises(ValueError, match=message):
        kernels.prune_forms(torch.randn(shape).bfloat16(), arguments.pop("forms", ["compressed"]), **arguments)


def test_without_sparse_tensor_cores_there_is_no_compressed_form():
    with pytest.raises(ValueError, match="no compressed form: cuSPARSELt needs a CUDA device, not cpu"):
        kernels.prune_forms(torch.randn(64, 64).bfloat16(), ["compressed"])
    with pytest.raises(ValueError, match="no compressed form: cuSPARSELt needs a CUDA device, not cpu"):
        kernels.mvue(torch.randn(64, 64).bfloat16(), form="compressed")
    shape = kernels.prune_forms(torch.empty(64, 64, device="meta").bfloat16(), ["compressed"])[0].shape
    assert shape == (64, 36)
