"""Stand-in until the real one is merged."""

from typing import NamedTuple

from .cusparselt import Algorithm


class Verdict(NamedTuple):
    backend: str
    algorithm: Algorithm | None
    sparse_us: float | None
    dense_us: float | None
    reason: str


def choose(problem, device, tune=False):
    return Verdict("dense", None, None, None, "not tuned: run `hf-sparse24 tune`")
