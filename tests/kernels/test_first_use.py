"""Kernels that are wrong are found on first use, and PyTorch runs in their place; the verdict is kept."""

import json
import os
import signal
import sys
import threading
import time

import bad_kernels
import pytest
import sparse24_kernels as kernels
import torch
from sparse24_kernels import cpu, dispatch, first_use, gpu, hard_problems, reference
from sparse24_kernels.cpu.library import load
from sparse24_kernels.dispatch import choose_kernels

CPU = torch.device("cpu")
WEIGHT = torch.randn(8, 16)
LIBRARY = load()  # into the usual cache folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and a process that has found nothing yet."""
    monkeypatch.setenv("SPARSE24_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(first_use, "_known", {})
    dispatch.choose.cache_clear()
    yield tmp_path / "cache"
    dispatch.choose.cache_clear()


@pytest.fixture(params=bad_kernels.WAYS, ids=lambda way: way.__name__)
def bad(request, cache, monkeypatch):
    """A bad implementation before all others; returns what is said of it."""
    monkeypatch.setattr(bad_kernels, "bad", request.param)
    monkeypatch.setenv("BAD_KERNELS", request.param.__name__)
    monkeypatch.setitem(first_use.SECONDS, "cpu", 1)
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", [bad_kernels.implementation()])
    return bad_kernels.WAYS[request.param]


def forget():
    """As a new process starts."""
    first_use._known.clear()
    dispatch.choose.cache_clear()


@pytest.mark.parametrize("bad", [bad_kernels.crashes], indirect=True)
def test_a_new_process_where_no_fork_would_do(bad, caplog, monkeypatch, tmp_path):
    monkeypatch.setattr(first_use, "_fork", first_use._spawn)
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # as notebooks do
    test_a_bad_kernel_ends_in_the_result_of_pytorch_and_one_warning(bad, caplog)


def test_a_bad_kernel_ends_in_the_result_of_pytorch_and_one_warning(bad, caplog):
    for _ in range(2):
        assert torch.equal(kernels.nm_mask(WEIGHT), reference.masks.nm_mask(WEIGHT, 2, 4, 1, False))
    (record,) = caplog.records
    assert "nm_mask" in record.getMessage() and bad in record.getMessage() and "unpack_nm" not in record.getMessage()
    choice = choose_kernels(CPU, operator="nm_mask")
    assert choice.implementation == "reference" and bad in choice.reason
    assert choose_kernels(CPU, operator="unpack_nm") == ("bad", "cpu"), "the check goes on behind what failed"


def test_verdicts_are_kept_for_what_they_depend_on(cache, monkeypatch):
    checked = []

    def check(name, operator, device, dtype):
        checked.append(operator)
        return "wrong" if operator == "b" else ""

    def ask(made_of="1", dtype=torch.float32, again=False):
        checked.clear()
        first_use._known.clear()
        found = first_use.verdicts(first_use.Subject("mine", ("a", "b"), CPU, dtype, check, made_of), again)
        assert found == {"a": "", "b": "wrong"}
        return len(checked)

    monkeypatch.delattr(os, "fork")  # so that the calls are seen
    assert [ask(), ask(), ask(again=True), ask("2"), ask(dtype=torch.bfloat16), ask()] == [2, 0, 2, 2, 2, 0]
    for path in cache.glob("checked-*.json"):
        assert json.loads(path.read_text())["environment"]["subject"] == "mine"
        path.write_text(path.read_text()[:-30])
    assert [ask(), ask()] == [2, 0], "a damaged file is made again"
    (cache / "not-written-to").write_text("")
    (cache / ".checks.lock").unlink()
    (cache / ".checks.lock").symlink_to(cache / "not-written-to")
    assert [ask("3"), ask("3")] == [2, 2], "no link is followed"
    monkeypatch.setenv("SPARSE24_CACHE", "/proc/nowhere")
    assert [ask(), ask()] == [2, 2], "each process checks where nothing can be kept"


def test_ctrl_c_says_nothing_of_a_kernel(cache, monkeypatch):
    seconds = [0.3]

    def slow(*arguments):
        time.sleep(seconds[0])
        return reference.masks.nm_mask(*arguments)

    monkeypatch.setattr(bad_kernels, "bad", slow)
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", [bad_kernels.implementation()])
    threading.Timer(0.2, lambda: os.kill(os.getpid(), 2)).start()
    with pytest.raises(KeyboardInterrupt):
        choose_kernels(CPU, operator="nm_mask")
        time.sleep(5)
    forget()
    seconds[0] = 0
    start = time.monotonic()
    assert choose_kernels(CPU, operator="nm_mask").implementation == "bad"
    assert time.monotonic() - start < 5, "it waited for the child that was interrupted"


@pytest.mark.parametrize("bad", [bad_kernels.lies], indirect=True)
def test_a_process_that_cannot_fork_or_is_not_told_of_its_children(bad, cache, monkeypatch):
    def too_many(*_):
        raise BlockingIOError("Resource temporarily unavailable")

    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert bad in choose_kernels(CPU, operator="nm_mask").reason
    finally:
        signal.signal(signal.SIGCHLD, before)
    forget()
    monkeypatch.setenv("SPARSE24_CACHE", str(cache / "another"))
    monkeypatch.setattr(first_use, "_fork", too_many)
    assert bad in choose_kernels(CPU, operator="nm_mask").reason


def test_a_check_that_cannot_be_kept_is_made_once(cache, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    checked = []
    monkeypatch.setattr(first_use, "_checked", lambda subject: checked.append(subject) or {"a": ""})
    monkeypatch.setattr(first_use, "write_json", full)
    assert first_use.verdicts(first_use.Subject("mine", ("a",), CPU, torch.float32, str)) == {"a": ""}
    assert len(checked) == 1


@pytest.mark.parametrize(
    "reason",
    [
        "OutOfMemoryError: CUDA out of memory",
        "RuntimeError: Triton Error [CUDA]: out of memory",
        "MemoryError: sparse24_linear: no memory",
        "it ended its process: Killed",
        "it ended its process: Terminated",
        "nan, not 1",
    ],
)
def test_a_machine_without_memory_says_nothing_of_a_kernel(reason, cache, monkeypatch):
    checked = []
    monkeypatch.setattr(first_use, "_checked", lambda subject: checked.append(subject) or {"a": reason})
    for _ in range(2):
        forget()
        assert first_use.verdicts(first_use.Subject("mine", ("a",), CPU, torch.float32, str)) == {"a": reason}
    assert len(checked) == (1 if reason.startswith("nan") else 2)


def test_a_verdict_holds_for_the_source_of_an_implementation_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source, found = tmp_path / "kernels_of_ones_own.py", []
    source.write_text("from sparse24_kernels.cpu import OPERATORS\n\n\ndef load():\n    return OPERATORS\n")
    from kernels_of_ones_own import load

    mine = dispatch.Implementation("mine", load, lambda device, dtype: None, str)
    for text in ("", "# changed\n", ""):
        source.write_text(source.read_text().removesuffix("# changed\n") + text)
        found.append(dispatch.subject(mine, CPU, torch.float32).made_of)
    assert found[0] == found[2] != found[1]
    monkeypatch.delattr(sys.modules["kernels_of_ones_own"], "__file__")  # as a notebook's
    assert f"process {os.getpid()}" in dispatch.subject(mine, CPU, torch.float32).made_of


def test_the_caller_s_modes_are_not_the_check_s(cache):
    if isinstance(LIBRARY, str):
        pytest.skip(LIBRARY)
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert choose_kernels(CPU, operator="packed_linear").implementation == "cpu"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, by which Triton's interpreter computes
@pytest.mark.parametrize("dtype", dispatch.KERNEL_DTYPES)
@pytest.mark.parametrize("package", [cpu, pytest.param(gpu, marks=pytest.mark.slow)], ids=["cpu", "gpu"])
def test_our_kernels_pass(package, dtype, monkeypatch):
    if package is cpu and isinstance(LIBRARY, str):
        pytest.skip(LIBRARY)
    if package is gpu:  # by an interpreter: the patterns that it has kernels for, and one that it has none for
        monkeypatch.setattr(hard_problems, "PATTERNS", ((2, 4), (6, 8)))
    for operator, function in vars(package.OPERATORS).items():
        assert function is None or hard_problems.first_difference(operator, function, CPU, dtype) == ""


TAMPERED = {
    "nm_mask": lambda mask: mask.logical_not_() if mask.dtype == torch.bool else mask.bitwise_xor_(1),
    "s_ste_scale": lambda scale: scale.mul_(1 + 1e-5),
}


@pytest.mark.parametrize("operator", vars(reference.OPERATORS))
def test_one_wrong_element_is_found(operator):
    """Of the last result of the first problem that has elements."""
    right = getattr(reference.OPERATORS, operator)

    def wrong(*arguments):
        results = right(*arguments)
        last = arguments[0] if results is None else results if isinstance(results, torch.Tensor) else results[-1]
        if last.numel() and operator in TAMPERED:
            TAMPERED[operator](last.view(-1)[-1:])
        elif last.numel():
            last.view(-1)[-1:] += 1 if last.dtype != torch.bool else True
        return results

    assert hard_problems.first_difference(operator, right, CPU, torch.float32) == ""
    assert "differ" in hard_problems.first_difference(operator, wrong, CPU, torch.float32)
