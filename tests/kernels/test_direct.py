"""Direct calls of cuSPARSELt, of a stand-in compiled for the CPU: results, plans that are kept, what fails."""

import ctypes
import gc
import os
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier, get_ident

import cslt
import pytest
import torch
import torch.nn.functional as F
from sparse24_kernels import first_use, nm_prune
from sparse24_kernels.cpu.build import BuildError, compiler
from sparse24_kernels.gemm import autotune, cusparselt, direct, first_check

CPU = torch.device("cpu")
SOURCE = Path(cslt.__file__).with_name("cusparselt_stand_in.cpp")
operator = torch.ops.sparse24.cslt_mm


class Library(direct.Library):
    """The stand-in, before it has made anything."""

    def __init__(self, file: Path):
        super().__init__(str(file), os.RTLD_NOW)
        self.raw = ctypes.CDLL(str(file))
        self.raw.stand_in_calls.restype = ctypes.c_char_p

    def change(self, fails: str = "", minor: int = 8, workspace: int = 0, early_bias: bool = False) -> None:
        """What it does from now on; `fails` names a call. Forgets the calls."""
        self.raw.stand_in_set(fails.encode(), minor, ctypes.c_size_t(workspace), early_bias)

    def calls(self) -> list[str]:
        return self.raw.stand_in_calls().decode().splitlines()


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    def build(*flags: str) -> Path:
        file = tmp_path_factory.mktemp("stand_in") / "library.so"
        try:
            command = [*compiler(), "-std=c++17", "-O1", "-shared", "-fPIC", *flags]
        except BuildError as error:
            pytest.skip(str(error))
        subprocess.run([*command, "-o", str(file), str(SOURCE), "-lstdc++"], check=True)
        return file

    return build


@pytest.fixture(scope="module")
def file(build):
    return build()


@pytest.fixture
def library(file, monkeypatch):
    """Called directly for CPU tensors, as for a GPU where the check on first use has passed."""
    gc.collect()  # what another test has made
    library = Library(file)
    library.change()
    monkeypatch.setattr(direct, "load", lambda: library)
    monkeypatch.setattr(cusparselt, "MULTIPLE", 16)
    monkeypatch.setattr(cusparselt, "not_direct", lambda device: "")
    yield library
    library.change()


def whole(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randint(-3, 4, shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_of_any_operands(library, dtype):
    matrix = nm_prune(whole(48, 64, dtype=dtype))
    compressed, bias = cusparselt.compress(matrix), whole(48, dtype=dtype)
    assert compressed.shape == (48, 36) and compressed.dtype == dtype
    for n in (16, 33, 48, 1):
        x = whole(n, 64, dtype=dtype)
        for rows in (x, whole(64, n, dtype=dtype).t(), whole(n, 128, dtype=dtype)[:, ::2]):
            assert torch.equal(operator(compressed, rows.t(), None, True, 17), F.linear(rows, matrix))
            assert torch.equal(operator(compressed, rows.t(), bias, True, 17), F.linear(rows, matrix, bias))
            assert torch.equal(operator(compressed, rows.t(), None, False, 3), matrix @ rows.t())
    odd = whole(16 * 64 + 1, dtype=dtype)[1:].view(16, 64)  # at an odd address
    assert torch.equal(operator(compressed, odd.t(), bias, True, 0), F.linear(odd, matrix, bias))
    assert operator(compressed, x[:0].t(), None, True, 0).shape == (0, 48)


@pytest.fixture
def gemm(library):
    """A GEMM of whole numbers, which is compared, by `algorithm` and with a bias or without."""
    matrix, x = nm_prune(whole(32, 64)), whole(16, 64)
    compressed = cusparselt.compress(matrix)

    def run(algorithm: int = 0, bias: torch.Tensor | None = None, tokens: int = 16) -> None:
        assert torch.equal(
            operator(compressed, x[:tokens].t(), bias, True, algorithm), F.linear(x[:tokens], matrix, bias)
        )

    return run


def test_a_plan_is_made_once(library, gemm):
    biases = whole(32), whole(32)
    gemm(), gemm(bias=biases[0])
    library.change()
    for _ in range(3):
        gemm(), gemm(bias=biases[1]), gemm(bias=biases[0])
    assert Counter(library.calls()) == {"Matmul 32 16 64 0": 9, "Bias": 6}  # an address is set where it changes
    gemm(algorithm=17), gemm(algorithm=3)
    assert [call for call in library.calls() if call.startswith(("Plan", "Algorithm"))] == [
        *("Algorithm 17", "Plan", "Algorithm 3", "Plan")
    ]


def test_a_workspace_is_handed_on(library, gemm):
    library.change(workspace=64)  # without one, or at an odd address, it fails
    gemm(), gemm()
    assert library.calls().count("Plan") == 1


def test_the_least_recently_used_plans_are_dropped(library, gemm, monkeypatch):
    monkeypatch.setattr(direct, "PLANS", 2)
    gemm(0), gemm(1), gemm(0)
    library.change()
    gemm(2)
    gc.collect()
    dropped = ["Plan destroyed", "Selection destroyed", *3 * ["Matrix destroyed"]]
    assert [call for call in library.calls() if "destroyed" in call] == dropped
    gemm(0)
    assert "Algorithm 0" not in library.calls() and len(library.plans) == 2
    gemm(1)
    assert "Algorithm 1" in library.calls()


def test_a_handle_outlives_its_plans(library, gemm):
    gemm()
    library.handles.clear()
    gc.collect()
    assert "Destroy" not in library.calls()
    library.plans.clear()
    gc.collect()
    assert library.calls()[-1] == "Destroy"


def test_a_thread_has_its_own_handle_and_plans_until_it_ends(library, gemm):
    gemm()
    library.change()
    together = Barrier(4)

    def work() -> None:
        together.wait()
        for algorithm in 4 * (0, 17):
            gemm(algorithm), gemm(algorithm, whole(32))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work) for _ in range(4)]:
            done.result()
    gc.collect()
    calls = Counter(call.split(" ")[0] for call in library.calls())
    assert calls["Matmul"] == 4 * 16 and calls["Init"] == calls["Destroy"] == 4
    assert library.calls().count("Plan") == library.calls().count("Plan destroyed") == 4 * 4 and len(library.plans) == 1
    gemm()
    assert library.calls()[-1] == "Matmul 32 16 64 0"


def test_backward_in_another_thread_and_in_a_compiled_graph(library):
    matrix, x, bias = nm_prune(whole(32, 64)), whole(16, 64), whole(32)
    compressed = cusparselt.compress(matrix)

    def twice(x):
        return operator(compressed, x.t(), bias, True, 17) + operator(compressed, x.t(), None, True, 17)

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), twice(x)) and torch.equal(twice(x), F.linear(x, matrix, bias) + x @ matrix.t())
    torch.library.opcheck(operator.default, (compressed, x.t(), bias, True, 17))
    torch.library.opcheck(torch.ops.sparse24.cslt_compress.default, (matrix,))


@pytest.mark.parametrize(
    "name", ["Init", "Sparse", "Dense", "Descriptor", "Bias", "Selection", "Algorithm", "Plan", "Matmul"]
)
def test_what_fails_leaves_nothing(library, name):
    compressed = cusparselt.compress(nm_prune(whole(32, 64)))
    library.handles.clear()
    gc.collect()
    library.change(fails=name)
    with pytest.raises(RuntimeError, match=r"cusparseLt\w+ returns 10: take backend='dense'"):
        operator(compressed, whole(16, 64).t(), whole(32), True, 17)
    library.plans.clear()
    gc.collect()
    made = [call.split(" ")[0] for call in library.calls() if call.startswith(("Sparse", "Dense"))]
    assert library.calls().count("Matrix destroyed") == len(made) - (name in made)


def test_versions_and_symbols_that_are_not_known(build, file, library, monkeypatch):
    for minor in (6, 11):
        library.change(minor=minor)
        with pytest.raises(OSError, match=rf"the structs of cuSPARSELt 0\.{minor}\.0 are not known"):
            Library(file)
    old = Library(build("-DVERSION_0_7"))  # one function is younger
    old.change(minor=7)
    monkeypatch.setattr(direct, "load", lambda: old)
    assert all(
        first_check.first_difference(CPU, torch.bfloat16, each) == "" for each in ("direct linear 17", "direct mm 3")
    )
    with pytest.raises(AttributeError, match="cusparseLtMatmul"):
        Library(build("-DcusparseLtMatmul=another"))


@pytest.mark.skipif(torch.backends.cusparselt.is_available(), reason="torch has loaded it")
def test_what_torch_has_not_loaded_is_not_called():
    reason = direct.load()
    assert "libcusparseLt" in reason and cusparselt.not_direct(CPU) == reason and cusparselt.way(CPU) == "torch"


def test_the_check_finds_a_bias_that_is_read_too_early_and_results_that_are_wrong(library, monkeypatch):
    def found() -> list[str]:
        library.plans.clear()
        return [first_check.first_difference(CPU, torch.float16, each) for each in ("direct linear 17", "direct mm 3")]

    assert found() == ["", ""]
    library.change(early_bias=True)
    assert found()[0].endswith("elements, with a bias") and found()[1] == ""
    library.change()
    right, here = direct.matmul, get_ident()
    monkeypatch.setattr(direct, "matmul", lambda *given, **how: right(*given, **how) + (get_ident() != here))
    assert all(wrong.endswith("elements in another thread") for wrong in found())


def test_a_gpu_is_called_directly_where_the_check_passes_and_then_several_are(monkeypatch):
    monkeypatch.setattr(direct, "load", object)
    cusparselt._not_direct.cache_clear()
    verdicts = {f"direct {gemm}": "" for gemm in ("linear 0", "mm 0", "linear 17", "mm 3")}
    monkeypatch.setattr(first_use, "verdict", lambda subject, operator: verdicts[operator])
    monkeypatch.setattr(cusparselt, "_unsupported_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cusparselt, "_first_gpu", [torch.device("cuda", 0)])  # torch's operator has run there
    first, second = (torch.device("cuda", index) for index in (0, 1))
    assert cusparselt.not_direct(torch.device("cuda")) == "" and cusparselt.way(second) == "direct"
    assert cusparselt.unsupported_device(second) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    start = partial(cusparselt.untuned_algorithm, second, torch.bfloat16)
    assert (start(True), start(False)) == (17, 3)
    verdicts["direct linear 17"] = "wrong"
    assert (start(True), start(False)) == (0, 3)
    assert autotune.current_environment(second).startswith("GPU, 9.0, None, direct, torch ")
    assert len(cusparselt.checked(second)) == 4
    verdicts["direct mm 0"] = "wrong numbers"
    cusparselt._not_direct.cache_clear()
    assert cusparselt.not_direct(first) == "wrong numbers"
    assert cusparselt.unsupported_device(first) is None
    assert cusparselt.unsupported_device(second) == "cuSPARSELt runs on one GPU in a process, here on cuda:0"
    with pytest.raises(RuntimeError, match="one GPU in a process"):
        cusparselt._take_handle_of_torch(second)
    assert autotune.current_environment(first).startswith("GPU, 9.0, None, torch, torch ")
    assert len(cusparselt.checked(first)) == 8
