"""Times without the host's share: by a graph, or behind a delay. A clock stands in for the device."""

import pytest
import torch
from sparse24_kernels.gemm.autotune import timing
from sparse24_kernels.gemm.autotune.check import Rejected, prepare, try_candidate
from test_autotune_check import PLAIN, SMALL, CpuLibrary

FLUSH = torch.zeros(8)


class Device:
    """Notes what it is asked to do; takes 7 us for whatever is timed, and the host `host_us` to issue it."""

    def __init__(self, monkeypatch, host_us: float):
        self.host_us, self.did = host_us, []
        monkeypatch.setattr(timing, "elapsed", self.elapsed)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.did.append(("delay", cycles)), raising=False)

    def elapsed(self, run):
        self.did.append("timed")
        run()
        return 7.0, self.host_us


def test_a_replay_writes_its_result_anew(monkeypatch):
    device = Device(monkeypatch, host_us=1e6)  # the host of a replay does not matter
    memory = torch.ones(4)
    monkeypatch.setattr(timing, "capture", lambda call: (lambda: memory.copy_(call()), memory))
    sample = timing.sampler(lambda: torch.full((4,), 5.0), FLUSH)
    us, result = sample()
    assert us == 7.0 and (result == 5).all() and device.did == ["timed"]
    monkeypatch.setattr(timing, "capture", lambda call: (lambda: None, memory))  # one that does nothing
    assert timing.sampler(lambda: memory, FLUSH)()[1].isnan().all()


def refuse(call):
    raise RuntimeError("operation not permitted when stream is capturing")


def test_what_cannot_be_captured_is_timed_behind_a_delay(monkeypatch):
    device = Device(monkeypatch, host_us=600)
    monkeypatch.setattr(timing, "capture", refuse)
    us, result = timing.sampler(lambda: torch.ones(2), FLUSH)()
    assert us == 7.0 and result.tolist() == [1, 1]
    assert device.did == [("delay", timing.DELAY_SECONDS * timing.HERTZ), "timed"]


def test_a_call_that_outlasts_the_delay_has_no_time(monkeypatch):
    Device(monkeypatch, host_us=1e6 * timing.DELAY_SECONDS + 1)
    monkeypatch.setattr(timing, "capture", refuse)
    with pytest.raises(timing.Exposed, match="issuing it took 2001 us, while the device was kept busy for 2000"):
        timing.sampler(lambda: torch.ones(2), FLUSH)()
    library = CpuLibrary(torch.device("cpu"))
    library.sampler = lambda call: timing.sampler(call, FLUSH)
    with pytest.raises(Rejected, match="issuing it took") as caught:
        try_candidate(library, prepare(library, SMALL), PLAIN, 1)
    assert not caught.value.deny  # it may be the machine's load


@pytest.mark.gpu
def test_on_a_gpu():
    a = torch.randn(1024, 1024, device="cuda")
    flush = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")
    by_graph, (us, result) = timing.sampler(lambda: a @ a, flush)(), timing._delayed(lambda: a @ a, flush)()
    assert torch.equal(by_graph[1], result)
    assert 0.5 < by_graph[0] / us < 2
