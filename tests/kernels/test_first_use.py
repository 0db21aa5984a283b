"""Kernels that are wrong are found on first use, and PyTorch runs in their place; the verdict is kept."""

import json
import os
import sys
import threading
import time

import bad_kernels
import pytest
import sparse24_kernels as kernels
import torch
from sparse24_kernels import dispatch, first_use, hard_problems, reference
from sparse24_kernels.cpu.library import load
from sparse24_kernels.dispatch import choose_kernels
from sparse24_kernels.first_use import Subject, check_in_child, verdict
from torch._subclasses import FakeTensorMode

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


@pytest.fixture
def bad(request, cache, monkeypatch):
    """A bad implementation before all others."""
    monkeypatch.setattr(bad_kernels, "bad", request.param)
    monkeypatch.setenv("BAD_KERNELS", request.param.__name__)
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", [bad_kernels.implementation()])
    return request.param


def ways(of):
    return pytest.mark.parametrize(
        ("bad", "reason"), of.items(), indirect=["bad"], ids=lambda x: getattr(x, "__name__", "")
    )


def forget():
    """As a new process starts."""
    first_use._known.clear()
    dispatch.choose.cache_clear()


@ways(bad_kernels.IN_PROCESS)
def test_a_bad_kernel_ends_in_the_result_of_pytorch_and_one_warning(bad, reason, caplog):
    for _ in range(2):
        assert torch.equal(kernels.nm_mask(WEIGHT), reference.masks.nm_mask(WEIGHT, 2, 4, 1, False))
    (record,) = caplog.records
    assert "nm_mask" in record.getMessage() and reason in record.getMessage()
    choice = choose_kernels(CPU, operator="nm_mask")
    assert choice.implementation == "reference" and reason in choice.reason
    assert choose_kernels(CPU, operator="unpack_nm") == ("bad", "cpu")
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
@ways(bad_kernels.IN_A_CHILD)
def test_a_child_survives_what_ends_a_process_and_its_verdict_is_kept(bad, reason, monkeypatch):
    monkeypatch.setattr(first_use, "SECONDS", 2.0 if bad is bad_kernels.hangs else 120.0)
    found = check_in_child([dispatch.subject(dispatch.IMPLEMENTATIONS[0], CPU, torch.float32)])
    assert [operator for _, operator, _ in found] == ["nm_mask", "unpack_nm"]
    assert reason in found[0][2] and not found[1][2], "the check goes on behind what failed"
    forget()
    assert reason in choose_kernels(CPU, operator="nm_mask").reason, "without another comparison"


@pytest.mark.slow
def test_a_process_compares_itself_where_no_child_starts(cache, monkeypatch):
    monkeypatch.setattr(first_use, "_answer", sys.exit)  # as where the device has no memory left
    for check in ({"a": "wrong"}.get, lambda operator: "wrong"):  # which cannot be pickled
        subject = Subject("mine", ("a",), CPU, torch.float32, check)
        assert check_in_child([subject]) == [(subject, "a", "wrong")]


def test_verdicts_are_kept_for_what_they_depend_on(cache, monkeypatch):
    checked = []

    def check(operator):
        checked.append(operator)
        return "wrong" if operator == "b" else ""

    def ask(made_of="1", dtype=torch.float32):
        checked.clear()
        first_use._known.clear()
        subject = Subject("mine", ("a", "b"), CPU, dtype, check, made_of)
        assert [verdict(subject, operator) for operator in "abab"] == ["", "wrong"] * 2
        return len(checked)

    assert [ask(), ask(), ask("2"), ask(dtype=torch.bfloat16), ask()] == [2, 0, 2, 2, 0]
    for path in cache.glob("checked-*.json"):
        assert json.loads(path.read_text())["environment"]["subject"] == "mine"
        path.write_text(path.read_text()[:-30])
    assert [ask(), ask()] == [2, 0], "a damaged file is made again"
    monkeypatch.setenv("SPARSE24_CACHE", "/proc/nowhere")
    assert [ask(), ask()] == [2, 2], "each process checks where nothing can be kept"


def test_ctrl_c_says_nothing_of_a_kernel(cache, monkeypatch):
    seconds = [1.0]

    def slow(*arguments):
        time.sleep(seconds.pop() if seconds else 0.0)
        return reference.masks.nm_mask(*arguments)

    monkeypatch.setattr(bad_kernels, "bad", slow)
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", [bad_kernels.implementation()])
    threading.Timer(0.2, lambda: os.kill(os.getpid(), 2)).start()
    with pytest.raises(KeyboardInterrupt):
        choose_kernels(CPU, operator="nm_mask")
    assert not first_use._known and not list(cache.glob("*"))
    assert choose_kernels(CPU, operator="nm_mask").implementation == "bad"


@pytest.mark.parametrize(
    ("reason", "times"),
    [
        ("RuntimeError: Triton Error [CUDA]: out of memory", 2),
        ("MemoryError: sparse24_linear: no memory", 2),
        ("it ended its process: Killed", 2),
        ("nan, not 1", 1),
    ],
)
def test_a_machine_without_memory_says_nothing_of_a_kernel(reason, times, cache):
    checked = []
    subject = Subject("mine", ("a",), CPU, torch.float32, lambda operator: checked.append(operator) or reason)
    for _ in range(2):
        forget()
        assert verdict(subject, "a") == verdict(subject, "a") == reason
    assert len(checked) == times


def test_threads_compare_once_and_kernels_may_use_others(cache):
    checked = []

    def check(operator):
        checked.append(operator)
        return "" if operator == "b" else verdict(subject, "b") + verdict(subject, operator)

    subject = Subject("mine", ("a", "b"), CPU, torch.float32, check)
    threads = [threading.Thread(target=verdict, args=(subject, "a")) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert checked == ["a", "b"] and set(first_use._known.values()) == {""} and len(first_use._known) == 2


def test_no_cuda_graph_captures_a_comparison(cache, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(first_use, "device_name", str)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    subject = Subject("mine", ("a",), torch.device("cuda", 0), torch.float32, str)
    with pytest.raises(RuntimeError, match="call it once before"):
        verdict(subject, "a")
    assert not first_use._known


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
    with torch.device("meta"), FakeTensorMode(), torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert choose_kernels(CPU, operator="packed_linear").implementation == "cpu"


TAMPERED = {
    "nm_mask": lambda mask: mask.logical_not_() if mask.dtype == torch.bool else mask.bitwise_xor_(1),
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
