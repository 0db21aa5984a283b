"""Where cuSPARSELt puts what it compresses, found out by experiment, so that pruning kernels can write it themselves.

The library compresses a pruned matrix that somebody had to write first. A kernel that prunes can write the compressed
matrix at once, with half the traffic, if it knows where things go; but the layout is documented nowhere, and differs
between devices and versions. So the library is asked: every place of a matrix is numbered, the numbers are written as
values and as indices, and where they come out is where those places go.

What is assumed is then proven for every place of a matrix of that very size, or else the library is left to do it:

* nothing is padded;
* the values come first, `[m, k/2]`, row-major;
* then the indices, in units of 16 bits, which hold four groups of a row as `Packed.indices` does;
* the unit of row r and column u lies at `rows[r] + units[u]`. All layouts that are made of tiles have this form,
  however often nested; those that are swizzled by exclusive or have not.
"""

import warnings

import torch
from torch import Tensor

from . import cusparselt, reference
from .backends import choose_kernels, implementation
from .cusparselt import Layout, size_key

MOST = 1024
"""So many sizes are looked into in a process, and no more: each takes time, and keeps `m + k / 16` numbers."""

NIBBLES = (0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110)
"""The six ways to keep two of four, as indices: first | second << 2. Digits to write numbers with."""

ROUNDS = 3
"""Matrices in an experiment. A unit holds four digits to the base 6 and a value 14 bits: three are enough for 2^31."""

LOWEST_VALUE = 0x0400
"""Values are these bits and up to 2^14 more: positive, normal numbers in fp16 and in bf16, which nothing changes."""

_found: dict[tuple, Layout | None] = {}


def known_layout(m: int, k: int, dtype: torch.dtype, device: torch.device) -> Layout | None:
    """The layout of compressed `[m, k]` matrices as `learn_layout` has found it; None where only the library knows."""
    return _found.get(size_key(m, k, dtype, device))


@torch.compiler.assume_constant_result
def learn_layout(m: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    """Do the experiment for a size, once in a process; where memory is short, the library is left to do it for good.

    Plans ask for it, at the first use of a size in eager mode and while torch.compile traces: never in a kernel's
    place inside a CUDA graph, whose memory is not ours to keep. What is found stays for as long as the process, because
    a captured graph may read it.
    """
    m, k, dtype, device = size = size_key(m, k, dtype, device)
    if size in _found or len(_found) >= MOST or m * k >= 2**31:
        return
    if device.type == "cuda":
        if choose_kernels(device, dtype).backend != "triton":
            return  # in PyTorch, packing takes longer than the library
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                return
    try:
        _found[size] = _experiment(*size)
    except torch.OutOfMemoryError:
        warnings.warn(f"no memory to find out how {m} x {k} matrices are compressed: cuSPARSELt does it", stacklevel=2)
        _found[size] = None


def who_compresses(device: torch.device) -> tuple[str, str]:
    """What writes compressed matrices on a device where sparse products run, judged by one size, and why."""
    try:
        learn_layout(1024, 1024, torch.bfloat16, device)
    except RuntimeError as error:
        return "nothing", f"{type(error).__name__}: {error}"
    if known_layout(1024, 1024, torch.bfloat16, device):
        return "pruning kernels", "the library's layout was found out"
    return "cuSPARSELt", "from pruned matrices: its layout was not found out, or there are no kernels here"


@torch.no_grad()
def _experiment(m: int, k: int, dtype: torch.dtype, device: torch.device) -> Layout | None:
    numbers = torch.zeros(m * k // 16, dtype=torch.int64, device=device)
    for i in range(ROUNDS):
        theirs = _compressed_by_library(_numbered(m, k, i, dtype, device))
        if theirs.numel() != m * k * 9 // 16:
            return None
        numbers += _read(theirs.view(-1)[m * k // 2 :], i)
    if numbers.min() < 0 or numbers.max() >= len(numbers):
        return None
    at = torch.full_like(numbers, -1).scatter_(0, numbers, torch.arange(len(numbers), device=device)).view(m, k // 16)
    layout = Layout(at[:, 0].int(), (at[0] - at[0, 0]).int())
    if at.min() < 0 or not torch.equal(layout.rows[:, None] + layout.units, at):
        return None
    for i in range(ROUNDS):  # made once more: to keep them would take memory where it may be short
        packed = _numbered(m, k, i, dtype, device)
        ours, theirs = reference.prune.compress(*packed, layout), _compressed_by_library(packed)
        if not torch.equal(ours.view(torch.int16), theirs.view(torch.int16)):
            return None
    return layout


def _compressed_by_library(packed: tuple[Tensor, Tensor]) -> Tensor:
    return cusparselt.compress(implementation(packed[1]).prune.unpack_nm(*packed))


def _numbered(m: int, k: int, i: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A packed matrix whose values and units of indices hold the i-th digits of their own numbers."""
    values = torch.arange(m * k // 2, dtype=torch.int32, device=device)  # in place from here on: it is large
    values.bitwise_right_shift_(14 * i).bitwise_and_(0x3FFF).add_(LOWEST_VALUE)
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
