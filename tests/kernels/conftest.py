"""Fixtures for the tests of the tuner, in several files."""

import threading

import pytest
from sparse24_kernels import cusparselt, tuner
from sparse24_kernels.tuner import search as tuner_search
from sparse24_kernels.tuner import table as tuner_table
from tuner_stage import HERE, StandIn


@pytest.fixture
def tuner_stage(tmp_path, monkeypatch):
    """A cache and shipped tables of this test alone, and a device that would do."""
    monkeypatch.setenv("SPARSE24_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuner_table, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(cusparselt, "why_not", lambda device: None)
    monkeypatch.setattr(tuner, "current_environment", lambda device: HERE)
    monkeypatch.setattr(tuner_search, "CANDIDATE_SECONDS", 0.5)
    before = set(threading.enumerate())
    tuner.reset()
    yield
    tuner.reset()
    assert set(threading.enumerate()) <= before, "a thread of the tuner is left"


@pytest.fixture
def stand_in(tmp_path):
    """Make a worker: `stand_in(_0=50, _1="hang", **{"0/2": 40})`."""
    return lambda **behaviour: StandIn(tmp_path, {key.removeprefix("_"): do for key, do in behaviour.items()})
