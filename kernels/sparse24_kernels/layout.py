"""Where cuSPARSELt puts what it compresses, found out by experiment, so that pruning kernels can write it themselves.

The library compresses a pruned matrix that somebody had to write first. A kernel that prunes can write the compressed
matrix at once, with half the traffic, if it knows where things go; but the layout is documented nowhere, and differs
between devices and versions. So the library is asked: every place of a matrix is numbered, the numbers are written as
values and as indices, and where they come out is where those places go.

What is assumed is then proven for every place of a matrix of that very size, or else the library is left to do it:

* the values come first, `[m, k/2]`, row-major;
* then the indices, in units of 16 bits, which hold four groups of a row as `Packed.indices` does;
* the unit of row r and column u lies at `rows[r] + units[u]`. All layouts that are made of tiles have this form,
  however often nested; those that are swizzled by exclusive or have not.
"""

import torch
from torch import Tensor

from . import cusparselt, reference
from .backends import implementation
from .cusparselt import Layout

MOST = 1024
"""So many sizes are looked into in a process, and no more: each takes time, and keeps `m + k / 16` numbers."""

NIBBLES = (0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110)
"""The six ways to keep two of four, as indices: first | second << 2. Digits to write numbers with."""

ROUNDS = 3
"""Matrices in an experiment. A unit holds four digits to the base 6 and a value 14 bits: three are enough for 2^31."""

LOWEST_VALUE = 0x0400
"""Values are these bits and up to 2^14 more: positive, normal numbers in fp16 and in bf16, which nothing changes."""


_found: dict[tuple, Layout | None] = {}


def find_layout(m: int, k: int, dtype: torch.dtype, device: torch.device) -> Layout | None:
    """The layout of compressed `[m, k]` matrices, or None where only the library can write it.

    The first call for a size does the experiment, unless a CUDA graph is being captured, which it would break. Layouts
    stay for as long as the process: a captured graph may read them.
    """
    size = m, k, dtype, device
    if size not in _found:
        if len(_found) == MOST or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return None
        _found[size] = _experiment(m, k, dtype, device)
    return _found[size]


@torch.no_grad()
def _experiment(m: int, k: int, dtype: torch.dtype, device: torch.device) -> Layout | None:
    try:
        packed = [_numbered(m, k, i, dtype, device) for i in range(ROUNDS)]
        room = implementation(packed[0][1])
        theirs = [cusparselt.compress(room.prune.unpack_nm(*matrix)) for matrix in packed]
    except torch.OutOfMemoryError:
        return None  # the library needs less than an experiment
    places = m * k // 16
    numbers = sum(_read(matrix[m * k // 2 :], i) for i, matrix in enumerate(theirs))
    if numbers.min() < 0 or numbers.max() >= places:
        return None
    at = torch.full_like(numbers, -1).scatter_(0, numbers, torch.arange(places, device=device)).view(m, k // 16)
    layout = Layout(at[:, 0].int(), (at[0] - at[0, 0]).int())
    if not torch.equal(layout.rows[:, None] + layout.units, at):
        return None
    proven = all(torch.equal(reference.prune.compress(*ours, layout), library) for ours, library in zip(packed, theirs))
    return layout if proven else None


def _numbered(m: int, k: int, i: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A packed matrix whose values and units of indices hold the i-th digits of their own numbers."""
    values = ((torch.arange(m * k // 2, dtype=torch.int32, device=device) >> 14 * i) & 0x3FFF) + LOWEST_VALUE
    units = torch.arange(m * k // 16, device=device) // 6 ** (4 * i)
    nibbles = torch.tensor(NIBBLES, device=device)
    indices = sum(nibbles[units // 6**j % 6] << 4 * j for j in range(4))
    return values.short().view(dtype).view(m, k // 2), indices.short().view(torch.uint8).view(m, k // 8)


def _read(indices: Tensor, i: int) -> Tensor:
    """What `_numbered` wrote, from a compressed matrix's indices: part of a number per unit, negative for nonsense."""
    nibbles = torch.full((16,), -(6**12), device=indices.device)
    nibbles[list(NIBBLES)] = torch.arange(6, device=indices.device)
    units = indices.view(torch.int16).long()
    return sum(nibbles[units >> 4 * j & 15] * 6 ** (4 * i + j) for j in range(4))
