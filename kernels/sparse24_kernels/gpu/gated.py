"""Triton: gated activations `act(gate) * up` and their gradients, in the memory layouts that they are given.

Every tensor is a matrix with its own strides, and a program works on one tile of all of them. Each is read or
written along its own contiguous dimension; where those differ, the compiler transposes the tile in shared memory.
Tensors that share one dense layout, whichever it is, are treated as a matrix of one row.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .groups import on_its_device


@on_its_device
def gated_activation(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """act(gate) * up, laid out as `gate`: each input is read once."""
    out = torch.empty_like(gate)
    _launch([gate, up, None], [out, None], kind)
    return out


@on_its_device
def gated_activation_backward(grad: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The gradients of `gate` and `up`, laid out as they are, in one pass over the three inputs."""
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    _launch([gate, up, grad], [grad_gate, grad_up], kind)
    return grad_gate, grad_up


def _launch(inputs: list[Any], results: list[Any], kind: str) -> None:
    """`_kernel(*inputs, *results)`, all of one shape or None; fills the results."""
    tensors, out = inputs + results, results[0]
    if not out.numel():
        return
    if all(x is None or x.stride() == out.stride() for x in tensors):
        # Results are dense, so these are all.
        matrices: list[Any] = [None if x is None else x.as_strided((1, x.numel()), (0, 1)) for x in tensors]
        ROWS, COLUMNS = 1, 4096
    else:
        matrices = [None if x is None else x.reshape(-1, x.shape[-1]) for x in tensors]
        ROWS, COLUMNS = 64, 64
    rows, columns = matrices[0].shape
    strides = [stride for x in matrices for stride in ((0, 0) if x is None else x.stride())]
    options = {"KIND": kind, "ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": 8, "enable_fp_fusion": True}
    programs = triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS)
    _kernel[(programs,)](*matrices, *strides, rows, columns, **options)
    for result, matrix in zip(results, matrices[len(inputs) :]):
        if result is not None and matrix.data_ptr() != result.data_ptr():
            # The strides of the leading dimensions fit no matrix, so `reshape` made a copy.
            result.copy_(matrix.view(result.shape))


@triton.jit
def _kernel(
    gate,
    up,
    grad,
    out,
    grad_up,
    gate_row,
    gate_column,
    up_row,
    up_column,
    grad_row,
    grad_column,
    out_row,
    out_column,
    grad_up_row,
    grad_up_column,
    rows,
    columns,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The activation, or where there is a `grad` the gradients of gate and up."""
    program, across = tl.program_id(0), tl.cdiv(columns, COLUMNS)
    row = (program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (program % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    if grad is not None:
        g = tl.load(grad + row * grad_row + column * grad_column, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(gate + row * gate_row + column * gate_column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + column * up_column, mask=inside, other=0.0).to(tl.float32)
    activation, slope = _activation(x, KIND)
    if grad is None:
        y = activation * u
    else:
        y = g * u * slope
        pointer = grad_up + row * grad_up_row + column * grad_up_column
        tl.store(pointer, (g * activation).to(grad_up.dtype.element_ty), mask=inside)
    tl.store(out + row * out_row + column * out_column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _activation(x, KIND: tl.constexpr):
    """act(x) and act'(x)."""
    if KIND == "geglu-exact":
        below, density = 0.5 + 0.5 * tl.erf(0.7071067811865476 * x), 0.3989422804014327 * tl.exp(-0.5 * x * x)
        return x * below, below + x * density
    elif KIND == "geglu":
        # 0.5 * (1 + tanh(y)) = sigmoid(2 * y), where nothing cancels; y = sqrt(2 / pi) * (x + 0.044715 * x^3).
        y = x * (1.5957691216057308 + 0.07135481282553182 * x * x)
        s, rest = tl.sigmoid(y), tl.sigmoid(-y)  # 1 - s would cancel
        return x * s, s + x * s * rest * (1.5957691216057308 + 0.21406443847659546 * x * x)
    else:
        s, rest = tl.sigmoid(x), tl.sigmoid(-x)
        return x * s, s + x * s * rest
