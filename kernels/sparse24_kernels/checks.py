"""Checks of arguments that the public functions share. Every message has the argument, its value, and what is allowed.

Whatever is wrong with an argument, its type too, raises ValueError before torch sees it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .formats import FORMS, OPERAND_MULTIPLE, SM90_MULTIPLE, STEP, Packed, mask_bytes, scale_columns

INPUTS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of inputs. Arithmetic is in fp32, of fp64 inputs in fp64."""


def check_is(kind: type, name: str, /, **arguments: object) -> None:
    """Raise ValueError unless each of `arguments` is a `kind`. A bool is no int."""
    wanted = (int, torch.SymInt) if kind is int else kind  # sizes are symbolic while a graph is traced
    for what, value in arguments.items():
        if not isinstance(value, wanted) or isinstance(value, bool) != (kind is bool):
            raise ValueError(f"{name}: {what}={described(value)}: must be an instance of {kind}")


def described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"tensor of {value.dtype} {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}... ({type(value).__name__})"


def check_size(name: str, /, **arguments: int) -> None:
    check_is(int, name, **arguments)
    for what, size in arguments.items():
        if size < 0:
            raise ValueError(f"{name}: {what}={size}: must not be negative")


def check_one_of(choices: Sequence[str], /, **arguments: object) -> None:
    for what, value in arguments.items():
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{what}={described(value)}: must be one of {list(choices)}")


def check_floating(name: str, /, **arguments: Tensor) -> None:
    """Raise ValueError unless each is a tensor of a dtype that this package computes with."""
    check_is(Tensor, name, **arguments)
    for what, tensor in arguments.items():
        if tensor.dtype not in INPUTS:
            raise ValueError(f"{name} takes fp64, fp32, bf16 and fp16, got {tensor.dtype} as {what}")


def check_matrix(name: str, /, **arguments: Tensor) -> None:
    for what, tensor in arguments.items():
        if tensor.dim() != 2:
            raise ValueError(f"{name} needs a matrix, got shape {tuple(tensor.shape)} as {what}")


def check_pattern(name: str, n: int, m: int) -> None:
    check_is(int, name, n=n, m=m)
    if not 0 < n < m:
        raise ValueError(f"{name}: an n:m pattern keeps n of m with 0 < n < m, got {n}:{m}")


def check_dim(name: str, tensor: Tensor, dim: int) -> int:
    """The dimension counted from the front. Raises ValueError where `tensor` does not have it."""
    check_is(int, name, dim=dim)
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"{name}: dim={dim} of a tensor of shape {tuple(tensor.shape)}")
    return dim % tensor.dim()


def check_groups(name: str, weight: Tensor, m: int, dim: int) -> int:
    """The dimension counted from the front. Raises ValueError unless it has whole groups of m floating numbers."""
    check_floating(name, weight=weight)
    along = check_dim(name, weight, dim)
    if weight.shape[dim] % m:
        raise ValueError(f"{name}: dimension {dim} of shape {tuple(weight.shape)} must be a multiple of {m}")
    return along


def check_form(name: str, form: str, tensor: Tensor, dim: int | None, dtype: torch.dtype) -> None:
    """Raise ValueError unless what is pruned in groups along `dim`, or along any dimension by None, has this form."""
    check_one_of(list(FORMS), form=form)
    if form != "dense":
        check_matrix(name, **{f"form={form!r} of": tensor})
    along = FORMS[form]
    if along is not None:
        if "packed" in form:
            needs = f"fp32, and a multiple of {OPERAND_MULTIPLE} along dimension {along}"
            fits = dtype == torch.float32 and not tensor.shape[along] % OPERAND_MULTIPLE
        else:
            needs = f"bf16 or fp16, and multiples of {SM90_MULTIPLE}"
            fits = dtype in (torch.bfloat16, torch.float16) and not any(n % SM90_MULTIPLE for n in tensor.shape)
        if not fits:
            raise ValueError(f"{name}: form={form!r} needs {needs}, got {dtype} {tuple(tensor.shape)}")
        if dim not in (None, along):
            raise ValueError(f"{name}: form={form!r} needs groups along dimension {along}, not {dim}")


def check_mask(name: str, mask: Tensor, weight: Tensor) -> None:
    """Raise ValueError unless a mask is bool of the weight's shape, or its packed bits."""
    check_is(Tensor, name, mask=mask)
    bits = (*weight.shape[:-1], mask_bytes(weight.shape[-1])) if weight.dim() else None
    if (mask.dtype, tuple(mask.shape)) not in ((torch.bool, tuple(weight.shape)), (torch.uint8, bits)):
        takes = f"the mask of {tuple(weight.shape)} is bool of that shape or uint8 bits of shape {bits}"
        raise ValueError(f"{name}: {takes}, got {described(mask)}")


def check_packed(name: str, packed: Packed) -> None:
    """Raise ValueError unless `packed` has a weight's values `[..., R, K*N/M]`, int8 with scales, and their mask."""
    if not isinstance(packed, Packed):
        raise ValueError(f"{name}: packed={described(packed)}: must be a Packed, values and mask")
    values, mask, scales, m = packed
    check_is(Tensor, name, values=values, mask=mask, **({} if scales is None else {"scales": scales}))
    check_is(int, name, m=m)
    dtypes = INPUTS if scales is None else (torch.int8,)
    fits = values.dtype in dtypes and mask.dtype == torch.uint8 and values.dim() == mask.dim() >= 2
    k, kept = (8 * mask.shape[-1], values.shape[-1]) if fits else (0, 0)
    if not 0 < kept < k or mask.shape[:-1] != values.shape[:-1] or m < 2 or STEP % m or k % m or kept * m % k:
        takes = f"{name} takes values [..., R, K * N / M] and a uint8 mask [..., R, K / 8]"
        int8 = "" if scales is None else "; values with scales are int8, without them never"
        raise ValueError(f"{takes}, got {described(values)}, {described(mask)} and M = {m}{int8}")
    if scales is not None:
        shape = (*values.shape[:-1], scale_columns(k))
        if scales.dtype not in INPUTS or tuple(scales.shape) != shape:
            raise ValueError(f"{name}: scales are floating {shape} for these values, got {described(scales)}")
    check_device(name, values, mask, scales)


def check_device(name: str, *tensors: Tensor | None) -> None:
    """Raise ValueError unless all are on one device: a kernel cannot read another device's addresses."""
    devices = list(dict.fromkeys(tensor.device for tensor in tensors if tensor is not None))
    if len(devices) > 1:
        raise ValueError(f"{name}: tensors on different devices: {', '.join(map(str, devices))}")
