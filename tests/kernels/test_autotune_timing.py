"""Times without the host's share: by a graph, or not at all. A clock stands in for the device."""

import pytest
import torch
from sparse24_kernels.gemm.autotune import timing
from sparse24_kernels.gemm.autotune.check import prepare, try_candidate
from test_autotune_check import PLAIN, SMALL, CpuLibrary

FLUSH = torch.zeros(8)


def seven_us(run):
    run()
    return 7.0


def test_a_replay_writes_its_result_anew(monkeypatch):
    monkeypatch.setattr(timing, "elapsed", seven_us)
    memory = torch.ones(4)
    monkeypatch.setattr(timing, "capture", lambda call: (lambda: memory.copy_(call()), memory))
    us, result = timing.sampler(lambda: torch.full((4,), 5.0), FLUSH)()
    assert us == 7.0 and (result == 5).all()
    monkeypatch.setattr(timing, "capture", lambda call: (lambda: None, memory))  # one that does nothing
    assert timing.sampler(lambda: memory, FLUSH)()[1].isnan().all()


def test_what_cannot_be_captured_has_no_time(monkeypatch):
    def refuse(call):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(timing, "capture", refuse)
    library = CpuLibrary(torch.device("cpu"))
    library.sampler = lambda call: timing.sampler(call, FLUSH)
    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
        try_candidate(library, prepare(library, SMALL), PLAIN, True)


@pytest.mark.gpu
def test_on_a_gpu():
    a = torch.randn(1024, 1024, device="cuda")
    flush = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")
    us, result = timing.sampler(lambda: a @ a, flush)()
    assert torch.equal(result, a @ a) and 0 < us < 1e4
