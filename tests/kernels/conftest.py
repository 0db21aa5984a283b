"""Fixtures for the tests of autotuning, in several files."""

import threading

import pytest
from autotune_stage import HERE, StandIn
from sparse24_kernels.gemm import autotune, cusparselt
from sparse24_kernels.gemm.autotune import search as autotune_search


@pytest.fixture
def autotune_stage(tmp_path, monkeypatch):
    """A cache of this test alone, and a device that would do."""
    monkeypatch.setenv("SPARSE24_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cusparselt, "unsupported_device", lambda device: None)
    monkeypatch.setattr(autotune, "current_environment", lambda device: HERE)
    monkeypatch.setattr(autotune_search, "CANDIDATE_SECONDS", 0.5)
    before = set(threading.enumerate())
    autotune.reset()
    yield
    autotune.reset()
    assert set(threading.enumerate()) <= before, "a thread of autotuning is left"


@pytest.fixture
def stand_in(tmp_path):
    """Make a worker: `stand_in(_0=50, _1="hang", **{"0/2": 40})`."""
    return lambda **behaviour: StandIn(tmp_path, {key.removeprefix("_"): do for key, do in behaviour.items()})
