"""How kernels write packed results: two values of every four, and their indices.

Packed along rows, groups are four neighbours in a slice; along columns, the four slices (see `groups.py`). In both
cases `pack4` chooses what is stored, and `store_indices` writes its indices.
"""

import triton
import triton.language as tl

from .groups import cast, nibbles_to_bytes, split4


@triton.jit
def pack4(x0, x1, x2, x3, m1, m2, m3):
    """The two stored of four, in order, and their indices as a nibble: first | second << 2.

    Stored are the two where m is not 0, or, of fewer, those and the first others. (Of more, the last two.) Whether the
    first element is one of the two follows from the others.
    """
    k1, k2, k3 = m1 != 0, m2 != 0, m3 != 0
    first_is_1, first_is_2 = k1 & (k2 | k3), k2 & k3
    first = tl.where(first_is_2, x2, tl.where(first_is_1, x1, x0))
    second = tl.where(k3, x3, tl.where(k2, x2, x1))
    nibble = tl.where(first_is_2, 2, tl.where(first_is_1, 1, 0)) | tl.where(k3, 12, tl.where(k2, 8, 4))
    return first, second, nibble


@triton.jit
def pack_rows(values, indices, slices, top, left, rows, columns, TINY: tl.constexpr):
    """Write a tile packed along its rows, from `pack4` of each slice `[G, COLS / 4]`: values `[rows, columns / 2]`,
    indices by `store_indices`."""
    NIBBLE: tl.constexpr = 2
    G: tl.constexpr = slices[0][NIBBLE].shape[0]
    BYTES: tl.constexpr = slices[0][NIBBLE].shape[1] // 2
    row = top + 4 * tl.arange(0, G)[:, None]
    for i in tl.static_range(4):
        _store_values(values, slices[i], row + i, left, rows, columns, TINY)
    # The four slices share one integer, because one slice alone does not have work for all threads.
    four = slices[0][NIBBLE] | (slices[1][NIBBLE] << 8) | (slices[2][NIBBLE] << 16) | (slices[3][NIBBLE] << 24)
    low, high = tl.split(four.reshape(G, BYTES, 2))
    packed = (low | (high << 4)).expand_dims(1) >> (8 * tl.arange(0, 4))[None, :, None]
    row = top + tl.arange(0, 4 * G)[:, None]
    store_indices(indices, packed.to(tl.uint8).reshape(4 * G, BYTES), row, left, rows, columns)


@triton.jit
def pack_columns(values, indices, packed, top, left, rows, columns, TINY: tl.constexpr):
    """Write a tile packed along its columns, from `pack4` of the four slices `[G, COLS]`: values `[columns, rows / 2]`,
    indices by `store_indices`."""
    first, second, nibble = packed
    G: tl.constexpr = first.shape[0]
    COLS: tl.constexpr = first.shape[1]
    D: tl.constexpr = values.dtype.element_ty
    stored = tl.join(cast(first, D, TINY), cast(second, D, TINY)).permute(1, 0, 2).reshape(COLS, 2 * G)
    c = left.to(tl.int64) + tl.arange(0, COLS)[:, None]
    half = top // 2 + tl.arange(0, 2 * G)[None, :]
    tl.store(values + c * (rows // 2) + half, stored, mask=(c < columns) & (half < rows // 2))
    store_indices(indices, nibbles_to_bytes(nibble.to(tl.uint8).trans(1, 0)), c, top, columns, rows)


@triton.jit
def _store_values(ptr, packed, row, left, rows, columns, TINY: tl.constexpr):
    """Write the values of a slice's packed rows."""
    first, second, _ = packed
    HALF: tl.constexpr = 2 * first.shape[1]
    D: tl.constexpr = ptr.dtype.element_ty
    stored = tl.join(cast(first, D, TINY), cast(second, D, TINY)).reshape(first.shape[0], HALF)
    half = left // 2 + tl.arange(0, HALF)[None, :]
    tl.store(ptr + row * (columns // 2) + half, stored, mask=(row < rows) & (half < columns // 2))


@triton.jit
def pack_row(y, m):
    """`pack4` for every four in the rows of a slice."""
    y0, y1, y2, y3 = split4(y)
    _, m1, m2, m3 = split4(m)
    return pack4(y0, y1, y2, y3, m1, m2, m3)


@triton.jit
def store_indices(ptr, packed, row, left, rows, columns):
    """Write the indices, bytes, of rows `[R, 1]` from element `left` on into `[rows, columns / 8]`."""
    byte = left // 8 + tl.arange(0, packed.shape[1])[None, :]
    tl.store(ptr + row * (columns // 8) + byte, packed, mask=(row < rows) & (byte < columns // 8))
