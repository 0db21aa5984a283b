"""Up to how many tokens a packed weight is multiplied by as it is: where that is known from, and what tuning keeps."""

import pytest
import sparse24_kernels as kernels
import torch
from sparse24_kernels import Pattern
from sparse24_kernels.cpu import limits
from sparse24_kernels.cpu.library import load
from sparse24_kernels.gemm import linear_problem, plan_packed

BF16, CPU, PATTERN = torch.bfloat16, torch.device("cpu"), Pattern(2, 4)


def most_tokens(dtype, values, out, inputs, pattern=PATTERN):
    return limits.most_tokens(limits.layer(dtype, values, pattern, out, inputs))


pytestmark = pytest.mark.skipif(isinstance(load(), str), reason=str(load()))


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSE24_CACHE", str(tmp_path))
    limits._read.cache_clear()
    yield
    limits._read.cache_clear()
    for forget in limits.ON_CHANGE:
        forget()


@pytest.fixture
def slower_from(monkeypatch):
    """The kernel is slower than dense math from that many tokens on."""

    def measure(tokens: int):
        monkeypatch.setattr(limits, "_times", lambda packed, count: (2.0, 3.0 if count < tokens else 1.0))

    return measure


@pytest.mark.parametrize(("first", "most"), [(16, 8), (64, 16), (1024, 256), (2048, None)])
def test_the_limit_is_the_last_number_before_the_kernel_is_slower(first, most, slower_from):
    slower_from(first)
    (times, _) = limits.tune([(32, 64, PATTERN)], BF16).values()
    assert limits.limit(times) == most
    plan = plan_packed(linear_problem(300, 32, 64, BF16), CPU)
    assert plan.backend.name == ("packed" if most is None or most >= 300 else "dense")
    assert "(measured here)" in plan.reason


def test_ctrl_c_keeps_what_is_measured_whatever_the_defaults_of_torch_are(slower_from, monkeypatch):
    slower_from(64)

    def interrupt(done):
        if done == 2:
            raise KeyboardInterrupt

    with torch.device("meta"), pytest.raises(KeyboardInterrupt):
        limits.tune([(32, 64, PATTERN), (64, 64, PATTERN), (96, 64, PATTERN)], BF16, interrupt)
    limits._read.cache_clear()  # as a new process
    assert most_tokens(BF16, BF16, 64, 64) == (16, "measured here")


def test_values_patterns_sizes_and_threads_are_kept_apart(slower_from, monkeypatch):
    slower_from(64)
    limits.tune([(32, 64, PATTERN)], BF16)
    slower_from(1024)
    limits.tune([(320, 640, PATTERN)], BF16)
    assert most_tokens(BF16, BF16, 32, 64) == most_tokens(BF16, torch.int8, 32, 64) == (16, "measured here")
    assert most_tokens(BF16, torch.int8, 320, 640) == (256, "measured here")
    for dtype, *other in ((torch.float32, torch.float32, 32, 64), (BF16, BF16, 40, 64), (BF16, BF16, 32, 64, (16, 32))):
        assert most_tokens(dtype, *other[:3], Pattern(*(other[3:] or [PATTERN])[0]))[1].startswith(
            "measured on another"
        )
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert most_tokens(BF16, BF16, 32, 64)[1].startswith("measured on another machine")


@pytest.mark.parametrize("damage", ['{"bfloat16', "[]", '{"%s": 0}', '{"%s": -5}', '{"%s": "16"}', '{"%s": true}'])
def test_a_damaged_file_counts_as_nothing(damage, slower_from, tmp_path):
    slower_from(64)
    limits.tune([(32, 64, PATTERN)], BF16)
    (file,) = tmp_path.glob("*.json")
    file.write_text(damage.replace("%s", limits.layer(BF16, BF16, PATTERN, 32, 64)))
    limits._read.cache_clear()
    with pytest.warns(UserWarning, match=file.name.replace(".", r"\.")):
        assert most_tokens(BF16, BF16, 32, 64)[1].startswith("measured on another machine")
    assert most_tokens(BF16, BF16, 32, 64)[1].startswith("measured on another machine"), "without another warning"


def test_a_layer_takes_the_new_limit_at_once(slower_from, monkeypatch):
    packed, x = kernels.pack_nm(torch.randn(32, 64)), torch.randn(20, 64)
    asked = []
    monkeypatch.setattr(limits, "most_tokens", lambda *a, most=limits.most_tokens: asked.append(a) or most(*a))
    kernels.matmul.packed_layer(x, packed)
    kernels.matmul.packed_layer(x, packed)
    assert len(asked) <= 1
    slower_from(16)
    asked.clear()
    limits.tune([(32, 64, PATTERN)], torch.float32)
    kernels.matmul.packed_layer(x, packed)
    assert asked == [(limits.layer(torch.float32, torch.float32, PATTERN, 32, 64),)]


def test_what_runs_where_nothing_was_measured(monkeypatch):
    assert min(limits._times(kernels.pack_nm(torch.randn(16, 64)), 3)) > 0
    monkeypatch.setattr(limits, "SHIPPED", {})
    most, known = most_tokens(BF16, BF16, 32, 64)
    assert most == 16 and known.endswith("was not measured: run `hf-sparse24 tune`")
    with pytest.raises(ValueError, match="the kernels take fp32, bf16 and fp16"):
        limits.tune([(16, 64, PATTERN)], torch.float64)
