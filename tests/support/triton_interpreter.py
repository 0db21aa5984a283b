"""Triton's interpreter with the rounding of the hardware.

As of Triton 3.9 the interpreter converts to bf16 by its own bit arithmetic, which rounds halves up, drops the
carry into the exponent, and loses subnormals. Kernels are compared bit for bit here, so those conversions go through
torch, which rounds to nearest even as the GPU does. Its `tl.dot` takes the bits of bf16 operands for integers; they are
made fp32 first, which is exact.

Before Triton 3.9 (torch 2.13 from PyPI comes with 3.7.1), its `minimum` and `maximum` propagate NaN whatever they are
told, and its `fma` rounds twice.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from packaging.version import Version
from triton.runtime import interpreter

_TORCH = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
}
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
_convert_float = interpreter._convert_float
_create_dot = interpreter.InterpreterBuilder.create_dot


def _through_torch(array, source, target, rounding_mode):
    rounds = rounding_mode is None or rounding_mode == interpreter._ir.ROUNDING_MODE.RTNE
    if not rounds or source not in _TORCH or target not in _TORCH:
        return _convert_float(array, source, target, rounding_mode)
    bits = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)
    converted = bits.view(_TORCH[source]).to(_TORCH[target])
    return converted.view(_BITS[converted.element_size()]).numpy().reshape(array.shape)


def _dot_in_fp32(self, a, b, *rest):
    a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return _create_dot(self, a, b, *rest)


def _fma(self, x, y, z):
    """In 64 bits of significand: two of fp32 are multiplied without rounding."""
    wide = x.data.astype(np.longdouble) * y.data + z.data
    return interpreter.TensorHandle(wide.astype(z.data.dtype), z.dtype.scalar)


def compute_as_hardware() -> None:
    """Replace what of the interpreter differs from the hardware; does nothing to compiled kernels."""
    interpreter._convert_float = _through_torch
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _dot_in_fp32
    if Version(triton.__version__) < Version("3.9"):
        builder.create_fma = _fma
        builder.create_minnumf = lambda self, x, y: self.binary_op(x, y, np.fmin)
        builder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)
