"""The library's layout, determined by experiment on stand-ins that lay matrices out in different ways."""

from contextlib import nullcontext
from importlib import import_module
from itertools import product

import cslt
import pytest
import sparse24_kernels as kernels
import torch
from sparse24_kernels import gpu, reference
from sparse24_kernels.formats import Compression, Layout
from sparse24_kernels.gemm import layout

CPU = torch.device("cpu")
ORDERS = [cslt.row_major, cslt.tiles, cslt.ampere, cslt.hopper]
FORMS = ["compressed", "compressed-transposed"]


def compressed_by_library(matrix):
    return kernels.compress(matrix, cslt.sparse_plan(matrix.shape[1])).values


@pytest.fixture
def library(monkeypatch):
    """Install a stand-in; returns it, with the compressions of the sizes below, and a fresh count of its calls."""

    def install(order):
        stand_in = cslt.install(monkeypatch, cslt.StandIn(order=order))
        sizes = zip(FORMS, ((64, 128), (128, 64)))
        compressions = {form: layout.find_compression(*size, torch.bfloat16, CPU) for form, size in sizes}
        stand_in.compressed = 0
        return stand_in, compressions

    return install


def found(m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Layout | None:
    return layout.layout_of(layout.find_compression(m, k, dtype, CPU), m, k, dtype, CPU)


def weight_and_mask() -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(64, 128)
    weight[:8, :64] = 0.0  # groups with fewer than two non-zeros
    weight[8:12] *= torch.tensor([0.0, -0.0, 1.0, 0.0]).repeat(32)
    return weight, kernels.transposable_mask(weight, packed=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_unit_is_found(monkeypatch, order, dtype):
    stand_in = cslt.install(monkeypatch, cslt.StandIn(order=order))
    rows, units = first = found(64, 128, dtype)
    assert torch.equal((rows[:, None] + units).flatten(), stand_in.positions(64, 128))
    assert rows.dtype == units.dtype == torch.int32
    calls = stand_in.compressed
    assert found(64, 128, dtype) is first and stand_in.compressed == calls


@pytest.mark.parametrize("order", ORDERS)
def test_pruning_writes_what_the_library_would(library, order):
    stand_in, compressions = library(order)
    weight, mask = weight_and_mask()
    dense, *ours = kernels.prune_forms(
        weight, ["dense", *FORMS], "mask", mask=mask, dtype=torch.bfloat16, compressions=compressions
    )
    estimate = kernels.mvue(weight.bfloat16(), dim=0, key=3)
    transposed = compressions["compressed-transposed"]
    ours.append(kernels.mvue(weight.bfloat16(), dim=0, key=3, form="compressed", compression=transposed))
    assert stand_in.compressed == 0
    for compressed, matrix in zip(ours, (dense, dense.t(), estimate.t())):
        x = torch.randn(16, matrix.shape[1]).bfloat16()
        assert compressed.dtype == torch.bfloat16 and compressed.shape == (len(matrix), matrix.shape[1] * 9 // 16)
        # Groups with fewer than two non-zeros can be written in several ways, so results are compared, not bits.
        result = kernels.sparse_linear(x, compressed, plan=cslt.sparse_plan(x.shape[-1]))
        assert torch.equal(result, torch.nn.functional.linear(x, matrix))
    full = torch.randn(64, 128).bfloat16()
    (compressed,) = kernels.prune_forms(full, ["compressed"], compressions=compressions)
    assert torch.equal(compressed.view(torch.int16), compressed_by_library(kernels.nm_prune(full)).view(torch.int16))


@pytest.mark.parametrize("package", [reference, gpu], ids=["reference", "triton"])
@pytest.mark.parametrize(("n", "m"), [(1, 2), (1, 4), (1, 8), (1, 16), (2, 8)])
def test_patterns_within_24_are_compressed(library, monkeypatch, package, n, m):
    """Along the rows and along the columns, by the kernels and by the library: what dense math multiplies by."""
    stand_in, compressions = library(cslt.hopper)
    for name in ("prune", "mvue"):
        function = getattr(getattr(package, name), name)
        module = import_module(f"sparse24_kernels.{name}")
        monkeypatch.setattr(module, "implementation", lambda *_, found=function, **__: found)
    weight = weight_and_mask()[0].bfloat16()
    operands = []
    for dim, form in ((1, "compressed"), (0, "compressed-transposed")):
        of_form = {"compressions": {form: compressions[form]}}
        for rule, stored in product(("magnitude", "soft-threshold", "mask"), (of_form, {})):
            mask = kernels.nm_mask(weight, n, m, dim) if rule == "mask" else None
            operands.append(kernels.prune_forms(weight, ["dense", form], rule, n, m, dim, mask=mask, **stored))
        if (n, m) == (1, 2):
            settings = {"form": "compressed", "compression": compressions[form]}
            estimates = [kernels.mvue(weight, 1, 2, dim, key=3, **some) for some in ({}, settings)]
            operands.append(estimates)
    assert stand_in.compressed == 6  # without a layout
    for i, (dense, compressed) in enumerate(operands):
        matrix = dense if i < len(operands) // 2 else dense.t()
        x = torch.randn(16, matrix.shape[1]).bfloat16()
        result = kernels.sparse_linear(x, compressed, plan=cslt.sparse_plan(matrix.shape[1]))
        assert torch.equal(result, torch.nn.functional.linear(x, matrix)) and matrix.any()


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
    compression = layout.find_compression(64, 128, torch.bfloat16, CPU)
    assert compression == Compression(72)
    weight = torch.randn(64, 128).bfloat16()
    (ours,) = kernels.prune_forms(weight, ["compressed"], compressions={"compressed": compression})
    assert torch.equal(ours.view(torch.int16), compress(kernels.nm_prune(weight)).view(torch.int16))


def test_a_padded_layout_is_left_to_the_library(monkeypatch):
    cslt.install(monkeypatch, cslt.StandIn(padding=1))
    compressions = {"compressed": layout.find_compression(64, 128, torch.bfloat16, CPU)}
    assert compressions["compressed"] == Compression(73)
    weight = torch.randn(64, 128).bfloat16()
    assert kernels.prune_forms(weight, ["compressed"], compressions=compressions)[0].shape == (64, 73)


def test_a_swizzled_layout_is_left_to_the_library(library):
    stand_in, compressions = library(cslt.swizzled)
    assert set(compressions.values()) == {Compression(36), Compression(72)}
    weight, mask = weight_and_mask()
    dense, compressed, transposed = kernels.prune_forms(
        weight, ["dense", *FORMS], "mask", mask=mask, dtype=torch.bfloat16, compressions=compressions
    )
    assert stand_in.compressed == 2
    for ours, matrix in ((compressed, dense), (transposed, dense.t())):
        assert torch.equal(ours.view(torch.int16), compressed_by_library(matrix).view(torch.int16))
    kernels.mvue(dense, dim=1, form="compressed", compression=compressions["compressed"])
    assert stand_in.compressed == 5  # two of them to compare with


@pytest.mark.parametrize("step", ["library_columns", "_numbered", "_compressed_by_library", "_read"])
@pytest.mark.parametrize("calls", [1, 3])
def test_without_memory_for_an_experiment_the_library_does_it(monkeypatch, step, calls):
    stand_in = cslt.install(monkeypatch, cslt.StandIn())
    real, left = getattr(layout, step), [calls]

    def short_of_memory(*arguments):
        left[0] -= 1
        if not left[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*arguments)

    monkeypatch.setattr(layout, step, short_of_memory)
    fits = step == "library_columns" and calls == 3  # it is called once
    with nullcontext() if fits else pytest.warns(UserWarning, match="no memory to determine how 32 x 32 matrices"):
        compression = layout.find_compression(32, 32, torch.float16, CPU)
    assert compression.columns == 18 and (compression.layout >= 0) == fits
    calls_before = stand_in.compressed
    (ours,) = kernels.prune_forms(torch.randn(32, 32).half(), ["compressed"], compressions={"compressed": compression})
    assert stand_in.compressed == calls_before + (not fits) and ours.dtype == torch.float16
    assert layout.find_compression(32, 32, torch.float16, CPU) == compression  # once is enough
    assert stand_in.compressed == calls_before + (not fits)


def test_only_so_many_layouts_are_determined(monkeypatch):
    stand_in = cslt.install(monkeypatch, cslt.StandIn())
    monkeypatch.setattr(layout, "MOST", 2)
    sizes = [(16, 16), (16, 32), (16, 48)]
    assert [found(*size) is None for size in sizes] == [False, False, True]
    assert stand_in.compressed == 2 * 2 * layout.ROUNDS + 3  # and once for the columns of each
    assert found(*sizes[0]) is not None
    cslt.install(monkeypatch, cslt.StandIn(padding=2))
    columns = [layout.find_compression(*size, torch.bfloat16, CPU).columns for size in sizes]
    assert columns == [11, 20, 29]  # those are always known


def test_what_an_int32_cannot_number_is_left_to_the_library(monkeypatch):
    monkeypatch.setattr(layout, "_experiment", lambda *size: pytest.fail("an experiment"))
    monkeypatch.setattr(layout, "_compressions", {})
    assert found(2**16, 2**15) is None


def test_a_plan_carries_the_compression(monkeypatch):
    stand_in = cslt.install(monkeypatch, cslt.StandIn())
    plan = kernels.plan_gemm(kernels.linear_problem(32, 64, 128, torch.bfloat16), CPU)
    assert plan.compression == layout.find_compression(64, 128, torch.bfloat16, CPU)
    calls = stand_in.compressed
    weight, compressions = torch.randn(64, 128).bfloat16(), {"compressed": plan.compression}
    (by_kernel,) = kernels.prune_forms(weight, ["compressed"], compressions=compressions)
    assert stand_in.compressed == calls
    (by_library,) = kernels.prune_forms(weight, ["compressed"])
    assert stand_in.compressed == calls + 1 and torch.equal(by_kernel, by_library)
    kernels.prune_forms(weight, ["compressed"], compressions={"compressed-transposed": plan.compression})
    assert stand_in.compressed == calls + 2  # of another form


def test_planning_changes_nothing_that_does_not_get_the_plan(monkeypatch):
    """What prune_forms, mvue and compress do follows from their arguments, whatever was planned in between."""
    stand_in = cslt.install(monkeypatch, cslt.StandIn())
    weight = torch.randn(64, 128)
    weight[:8, :64] = 0.0  # such groups can be written in several ways: here the kernel and the library differ

    def results():
        stand_in.compressed = 0
        (pruned,) = kernels.prune_forms(weight, ["compressed"], dtype=torch.bfloat16)
        estimate = kernels.mvue(weight.bfloat16(), key=3, dim=1, form="compressed")
        compressed = compressed_by_library(kernels.nm_prune(weight, dtype=torch.bfloat16))
        return stand_in.compressed, [x.view(torch.int16) for x in (pruned, estimate, compressed)]

    calls, before = results()
    assert kernels.plan_gemm(kernels.linear_problem(32, 64, 128, torch.bfloat16), CPU).compression.layout >= 0
    calls_after, after = results()
    assert calls == calls_after == 3
    assert all(torch.equal(x, y) for x, y in zip(before, after))


def test_numbers_keep_their_meaning(monkeypatch):
    cslt.install(monkeypatch, cslt.StandIn(order=cslt.tiles))
    first = layout.find_compression(64, 128, torch.bfloat16, CPU)
    rows, units = (x.clone() for x in layout.layout_of(first, 64, 128, torch.bfloat16, CPU))
    cslt.install(monkeypatch, cslt.StandIn(order=cslt.row_major))
    second = layout.find_compression(64, 128, torch.bfloat16, CPU)
    assert second.columns == first.columns and second.layout > first.layout
    again = layout.layout_of(first, 64, 128, torch.bfloat16, CPU)
    assert torch.equal(again.rows, rows) and torch.equal(again.units, units)


def test_a_layout_of_another_size_is_refused(monkeypatch):
    """A kernel would write where the numbers say, outside the tensor."""
    cslt.install(monkeypatch, cslt.StandIn())
    compression = layout.find_compression(64, 128, torch.bfloat16, CPU)
    weight = torch.randn(64, 128).bfloat16()
    for wrong, matrix in (
        (compression, weight[:32]),
        (compression, weight.half()),
        (compression._replace(columns=75), weight),
        (Compression(72, 10**6), weight),
    ):
        message = f"is not of {len(matrix)} x 128 matrices of {matrix.dtype} on cpu: pass that of plan_gemm"
        with pytest.raises(RuntimeError, match=message):
            kernels.prune_forms(matrix, ["compressed"], compressions={"compressed": wrong})
        with pytest.raises(RuntimeError, match=message):
            kernels.mvue(matrix, form="compressed", compression=wrong)


def test_nothing_is_asked_during_graph_capture(monkeypatch):
    cslt.install(monkeypatch, cslt.StandIn())
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(layout, "_ask", lambda *size: pytest.fail("asked"))
    assert layout.find_compression(64, 128, torch.bfloat16, cuda) == Compression(72)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(layout, "_ask", lambda *size: Compression(75, -1))
    assert layout.find_compression(64, 128, torch.bfloat16, cuda) == Compression(75)  # the answer before was not kept


def test_random_numbers_are_left_alone(monkeypatch):
    cslt.install(monkeypatch, cslt.StandIn())
    state = torch.get_rng_state()
    found(32, 64)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("shape", "arguments", "message"),
    [
        ((64, 40), {}, "multiples of 16, not 64 x 40"),
        ((64, 64), {"dtype": torch.float32}, "the sparse GEMMs run in bf16 and fp16, not torch.float32"),
        ((64, 64), {"dim": 0}, "needs groups along dimension 1, and 'magnitude' has dim=0"),
        ((64, 64), {"n": 3}, "is for 2:4 and patterns within it, not 3:4"),
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
