"""Which implementation runs a product, and why. Nothing falls back in silence: every choice carries its reason."""

from typing import NamedTuple

import torch

BACKENDS = ("reference",)
"""Implementations of `sparse_mm` that this version has. `reference` is dense math on the pruned values."""


class Choice(NamedTuple):
    backend: str
    reason: str


def choose_backend(requested: str, device: torch.device) -> Choice:
    """Turn `"auto"` or a backend's name into the backend to run on `device`, with the reason in words.

    Raises:
        ValueError: `requested` is not `"auto"` or one of `BACKENDS`.
    """
    if requested != "auto" and requested not in BACKENDS:
        raise ValueError(f"backend={requested!r} is not available; choose 'auto' or one of {list(BACKENDS)}")
    if requested == "reference":
        return Choice("reference", "requested")
    return Choice("reference", f"no sparse tensor-core backend in this version serves {device.type}")
