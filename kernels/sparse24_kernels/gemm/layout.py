"""How cuSPARSELt stores a compressed matrix: its size, and the layout, so that pruning kernels can write it themselves.

The library compresses a pruned matrix, which somebody had to write first. A kernel that prunes can write the compressed
matrix directly, with half the traffic, if it knows where everything goes. The layout is not documented, and differs
between devices and versions, so it is determined by experiment: every position of a matrix is numbered, the numbers are
written as values and as indices, the library compresses that, and where a number comes out is where its position goes.

The experiment assumes the following, and then verifies it for every position of a matrix of that very size. Where the
verification fails, the library compresses:

* nothing is padded;
* the values come first, `[m, k/2]`, row-major;
* then the indices, in units of 16 bits, which hold four groups of a row as `Packed.indices` does;
* the unit of row r and column u is at `rows[r] + units[u]`. All layouts made of nested tiles have this form; layouts
  swizzled by exclusive or do not.
"""

import threading
import warnings

import torch
from torch import Tensor

from .. import reference
from ..dispatch import Choice, choose_kernels
from ..formats import Compression, Layout, unpadded_columns
from .cusparselt import Size, compress_by_library, library_columns, size_key
from .operand import unpack

MOST = 1024
"""Experiments in a process, at most: each takes time, and a layout keeps `m + k / 16` numbers."""

NIBBLES = (0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110)
"""The six ways to keep two of four, as indices: first | second << 2. Numbers are written in these digits."""

ROUNDS = 3
"""Matrices in an experiment. Each 16-bit word of indices encodes four base-6 digits and each value 14 bits, so three
matrices number up to 2^31 positions."""

LOWEST_VALUE = 0x0400
"""Values have these bits and up to 2^14 more: positive normal numbers in fp16 and in bf16, which nothing changes."""

_layouts: list[tuple[Size, Layout]] = []
"""Every layout that was found; a `Compression` has the index. Append-only, so a number never changes its meaning, and
entries stay as long as the process, because a captured CUDA graph may read the tensors."""

_compressions: dict[Size, Compression] = {}
"""A memo of a pure function: the library gives one answer for a size, whenever it is asked."""

_lock = threading.Lock()  # autograd plans from threads of its own


def layout_of(compression: Compression, m: int, k: int, dtype: torch.dtype, device: torch.device) -> Layout | None:
    """The layout in which kernels write a compressed `[m, k]`, or None where the library has to compress.

    Raises:
        RuntimeError: the compression is of another size, dtype or device; a kernel would write out of bounds.
    """
    if compression.layout < 0:
        return None
    if compression.layout < len(_layouts) and compression.columns == unpadded_columns(k):
        size, layout = _layouts[compression.layout]
        if size == (m, k, dtype, device):
            return layout
    raise RuntimeError(
        f"{compression} is not of {m} x {k} matrices of {dtype} on {device}: pass that of plan_gemm for this size"
    )


@torch.compiler.assume_constant_result
def find_compression(m: int, k: int, dtype: torch.dtype, device: torch.device) -> Compression:
    """How the library stores `[m, k]` matrices, determined once per size in a process.

    Planning calls this, in eager mode and while torch.compile traces, but no operator does: an experiment during CUDA
    graph capture would become part of the graph. During capture, an unknown size gets the formula's columns and no
    layout. Where memory is short, the size keeps that answer, with a warning.
    """
    m, k, dtype, device = size = size_key(m, k, dtype, device)
    if size in _compressions:
        return _compressions[size]
    fallback = Compression(unpadded_columns(k), -1)
    if device.type == "cuda":
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                return fallback
    with _lock:
        if size not in _compressions:
            try:
                _compressions[size] = _ask(*size)
            except torch.OutOfMemoryError:
                what = f"no memory to determine how {m} x {k} matrices are compressed: cuSPARSELt compresses them"
                warnings.warn(what, stacklevel=2)
                _compressions[size] = fallback
    return _compressions[size]


def compressor(device: torch.device) -> Choice:
    """What writes compressed matrices on a device that runs sparse GEMMs, judged by one size; and why."""
    try:
        compression = find_compression(1024, 1024, torch.bfloat16, device)
    except RuntimeError as error:
        return Choice("nothing", f"{type(error).__name__}: {error}")
    if compression.layout >= 0:
        return Choice("pruning kernels", "the library's layout is known by experiment")
    return Choice("cuSPARSELt", "from pruned matrices: its layout is unknown, or there are no kernels here")


def _ask(m: int, k: int, dtype: torch.dtype, device: torch.device) -> Compression:
    columns = library_columns(m, k, dtype, device)
    # In PyTorch, packing takes longer than the library; and rows and units are int32.
    has_kernels = device.type != "cuda" or choose_kernels(device, dtype).backend == "triton"
    if columns != unpadded_columns(k) or not has_kernels or len(_compressions) >= MOST or m * k >= 2**31:
        return Compression(columns, -1)
    layout = _experiment(m, k, dtype, device)
    if layout is None:
        return Compression(columns, -1)
    _layouts.append(((m, k, dtype, device), layout))
    return Compression(columns, len(_layouts) - 1)


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
    order = torch.arange(len(numbers), device=device)
    unit_at = torch.full_like(numbers, -1).scatter_(0, numbers, order).view(m, k // 16)
    layout = Layout(unit_at[:, 0].int(), (unit_at[0] - unit_at[0, 0]).int())
    if unit_at.min() < 0 or not torch.equal(layout.rows[:, None] + layout.units, unit_at):
        return None
    for i in range(ROUNDS):  # the matrices are made again: keeping them would take memory where it may be short
        packed = _numbered(m, k, i, dtype, device)
        ours, theirs = reference.prune.compress(*packed, layout), _compressed_by_library(packed)
        if not torch.equal(ours.view(torch.int16), theirs.view(torch.int16)):
            return None
    return layout


def _compressed_by_library(packed: tuple[Tensor, Tensor]) -> Tensor:
    return compress_by_library(unpack(*packed))


def _numbered(m: int, k: int, i: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """A packed matrix whose values and units of indices hold the i-th digits of their own numbers."""
    values = torch.arange(m * k // 2, dtype=torch.int32, device=device)  # in place from here on: it is large
    values.bitwise_right_shift_(14 * i).bitwise_and_(0x3FFF).add_(LOWEST_VALUE)
    units = torch.arange(m * k // 16, device=device) // 6 ** (4 * i)
    nibbles = torch.tensor(NIBBLES, device=device)
    indices = torch.zeros_like(units)
    for j in range(4):
        indices += nibbles[units // 6**j % 6] << 4 * j
    return values.short().view(dtype).view(m, k // 2), indices.short().view(torch.uint8).view(m, k // 8)


def _read(indices: Tensor, i: int) -> Tensor:
    """What `_numbered` wrote, from a compressed matrix's indices: part of a number per unit, negative for nonsense."""
    nibbles = torch.full((16,), -(6**12), device=indices.device)
    nibbles[list(NIBBLES)] = torch.arange(6, device=indices.device)
    units = indices.view(torch.int16).long()
    numbers = torch.zeros_like(units)
    for j in range(4):
        numbers += nibbles[units >> 4 * j & 15] * 6 ** (4 * i + j)
    return numbers
