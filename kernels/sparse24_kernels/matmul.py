"""GEMMs with one 2:4 operand, run as their plan says: by dense math on its zeros, or by the backend of the plan."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from .cache_folder import ON_CHANGE
from .checks import check_device, check_floating, check_is, check_matrix, check_packed
from .formats import Packed, Pattern
from .gemm.backend import DENSE, GemmPlan, Operand
from .gemm.planning import plan_packed
from .gemm.problem import linear_problem
from .gemm.sparse_backends import CUSPARSELT

_DENSE = GemmPlan(DENSE, "no plan was given")
_compressed = WeakIdKeyDictionary()  # what `_encoded` keeps, by the values of the packed weight: it goes with them


def sparse_linear(
    x: Tensor, weight: Tensor | Operand, bias: Tensor | None = None, *, plan: GemmPlan | None = None
) -> Tensor:
    """`F.linear(x, weight, bias)` with a 2:4 weight.

    Args:
        x: `[..., in]`, fp64, fp32, bf16 or fp16; what the plan's backend takes of these.
        weight: in the dtype of `x`. Without a plan, or for dense math, `[out, in]` with any strides; otherwise what
            `compress` made of it.
        bias: `[out]` in the dtype of `x`, or None.
        plan: of `plan_gemm(linear_problem(...), ...)`; None is dense math.

    Returns:
        `[..., out]` in the operands' dtype, row-major.

    Raises:
        ValueError: shapes, dtypes or devices of the operands that do not fit each other, or that the backend does not
            take.

    Examples:
        >>> weight = nm_prune(torch.randn(16, 32))
        >>> x = torch.randn(8, 32)
        >>> plan = plan_gemm(linear_problem(tokens=8, out=16, inputs=32, dtype=x.dtype), x.device)
        >>> sparse_linear(x, compress(weight, plan), plan=plan).shape
        torch.Size([8, 16])
    """
    check_floating("sparse_linear", x=x)
    if not x.dim():
        raise ValueError("sparse_linear: x must have a last dimension, got shape ()")
    operand, plan = _checked("sparse_linear", "weight", weight, x, x.shape[-1], plan)
    _check_bias("sparse_linear", bias, x, len(operand.values))
    return plan.backend.linear(x, operand, bias, plan)


def sparse_layer(x: Tensor, weight: Tensor, bias: Tensor | None, plan: GemmPlan) -> Tensor:
    """`sparse_linear` by a sparse plan, for layers: the checks would take as long as a small layer."""
    if x.dtype != weight.dtype or x.device != weight.device:
        return sparse_linear(x, weight, bias, plan=plan)  # says so
    return plan.backend.linear(x, Operand(weight), bias, plan)


def packed_linear(x: Tensor, packed: Packed, bias: Tensor | None = None, *, plan: GemmPlan | None = None) -> Tensor:
    """`F.linear(x, unpack_nm(packed), bias)`; for as many tokens as a kernel is known to win, without the dense weight.

    Not differentiable where a kernel runs: the gradient of x is `grad @ unpack_nm(packed)`. Where many tokens go to
    cuSPARSELt, a weight whose values require no gradient is compressed in its first call, and 9/16 of the dense bytes
    more are kept as long as the values. It is compressed again after a write that autograd counts; through `.data` a
    write is not seen.

    Args:
        x: `[..., in]`, fp64, fp32, bf16 or fp16.
        packed: what `pack_nm` made of a weight `[out, in]` in the dtype of `x`, or `quantize_packed` of that.
        bias: `[out]` in that dtype, or None.
        plan: of `plan_packed` or `plan_gemm`; None makes it here.

    Returns:
        `[..., out]` in the operands' dtype, row-major, summed in fp32 (of fp64 operands in fp64). By dense math it has
        the bits of `F.linear`; the kernel rounds once, and gives the same bits in every call.

    Raises:
        ValueError: shapes, dtypes or devices of the operands that do not fit each other.

    Examples:
        >>> packed = pack_nm(nm_prune(torch.randn(16, 32)))
        >>> packed_linear(torch.randn(8, 32), packed).shape
        torch.Size([8, 16])
    """
    check_floating("packed_linear", x=x)
    check_packed("packed_linear", packed)
    values, dtype = packed.values, packed.dtype
    check_matrix("packed_linear", values=values)
    out, inputs = len(values), packed.columns
    if not x.dim():
        raise ValueError("packed_linear: x must have a last dimension, got shape ()")
    check_device("packed_linear", x, values)
    if (x.shape[-1], x.dtype) != (inputs, dtype):
        weight = f"a packed weight of {dtype} {out} x {inputs}"
        raise ValueError(f"packed_linear: {weight} does not contract with x of {x.dtype} {tuple(x.shape)}")
    _check_bias("packed_linear", bias, x, out)
    if plan is None:
        plan = _plan_packed(x.shape[:-1].numel(), values.shape, inputs, packed.m, x.dtype, values.dtype, x.device)
    check_is(GemmPlan, "packed_linear", plan=plan)
    return plan.backend.linear(x, _encoded(packed, plan), bias, plan)


def packed_layer(x: Tensor, packed: Packed, bias: Tensor | None = None) -> Tensor:
    """`packed_linear` without checks and with a kept plan, for layers: both would take as long as a small layer."""
    values, inputs = packed.values, packed.columns
    if torch.compiler.is_compiling() or x.shape[-1:] != (inputs,) or x.dtype != packed.dtype:
        return packed_linear(x, packed, bias)
    plan = _kept_plan(x.numel() // inputs, values.shape, inputs, packed.m, x.dtype, values.dtype, x.device)
    return plan.backend.linear(x, _encoded(packed, plan), bias, plan)


def _encoded(packed: Packed, plan: GemmPlan) -> Operand:
    """The operand of a packed weight, of a frozen one from memory: compressing takes longer than its GEMM."""
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    # A CUDA graph runs again without looking.
    if plan.backend is not CUSPARSELT or traced or (packed.mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        return plan.backend.encode(packed)
    tensors = [tensor for tensor in packed[:3] if tensor is not None]
    # One of another type may have no values, one that requires a gradient trains, one of inference mode has no version.
    if any(type(x) not in (Tensor, nn.Parameter) or x.requires_grad or x.is_inference() for x in tensors):
        return plan.backend.encode(packed)
    # A weak reference holds the identity of a freed storage, so another one cannot take it.
    state = [(StorageWeakRef(x.untyped_storage()), x.data_ptr(), x._version) for x in tensors]
    kept = _compressed.get(packed.values)
    if kept is None or kept[0] != state:
        with torch.inference_mode(False):
            kept = _compressed[packed.values] = state, plan.backend.encode(packed)
    return kept[1]


def _plan_packed(
    tokens: int, shape: Sequence[int], k: int, m: int, dtype: torch.dtype, values: torch.dtype, device: torch.device
) -> GemmPlan:
    out, kept = shape  # of the values
    problem = linear_problem(tokens, out, k, dtype)._replace(pattern=Pattern(kept * m // k, m))
    return plan_packed(problem._replace(is_int8=values == torch.int8), device)


_kept_plan = lru_cache(maxsize=4096)(_plan_packed)
ON_CHANGE.append(_kept_plan.cache_clear)


def sparse_mm(sparse: Tensor | Operand, dense: Tensor, *, plan: GemmPlan | None = None) -> Tensor:
    """`sparse @ dense` with a 2:4 left operand.

    Args:
        sparse: without a plan, or for dense math, `[m, k]`, 2:4 along k; otherwise what `compress` made of it.
            fp64, fp32, bf16 or fp16; what the plan's backend takes of these.
        dense: `[k, n]` in the same dtype, any strides.
        plan: of `plan_gemm(mm_problem(...), ...)`; None is dense math.

    Returns:
        `[m, n]` in the operands' dtype, row-major.

    Raises:
        ValueError: shapes, dtypes or devices of the operands that do not fit each other, or that the backend does not
            take.
    """
    check_floating("sparse_mm", dense=dense)
    check_matrix("sparse_mm", dense=dense)
    operand, plan = _checked("sparse_mm", "sparse", sparse, dense, dense.shape[0], plan)
    return plan.backend.mm(operand, dense, plan)


def _checked(
    name: str, what: str, sparse: Tensor | Operand, dense: Tensor, k: int, plan: GemmPlan | None
) -> tuple[Operand, GemmPlan]:
    """The operand, of a tensor one without mask and scale, and the plan. ValueError: a 2:4 `[m, k]` that does not fit
    the dense operand; encoded sizes are the backend's."""
    plan = _DENSE if plan is None else plan
    check_is(GemmPlan, name, plan=plan)
    operand = sparse if isinstance(sparse, Operand) else Operand(sparse)
    values = operand.values
    check_is(Tensor, name, **{what: values})
    if not plan.is_sparse:
        check_floating(name, **{what: values})
        check_matrix(name, **{what: values})
    check_device(name, values, dense)
    if operand.scale is None and values.dtype != dense.dtype:
        raise ValueError(f"{name} needs operands of one dtype, got {values.dtype} (2:4) and {dense.dtype} (dense)")
    if not plan.is_sparse and values.shape[1] != k:
        shapes = f"{tuple(values.shape)} does not contract with a dense one of shape {tuple(dense.shape)}"
        raise ValueError(f"{name}: a 2:4 operand of shape {shapes}: {values.shape[1]} and {k}")
    return operand, plan


def _check_bias(name: str, bias: Tensor | None, x: Tensor, out: int) -> None:
    if bias is not None:
        check_floating(name, bias=bias)
        check_device(name, x, bias)
        if tuple(bias.shape) != (out,) or bias.dtype != x.dtype:
            raise ValueError(f"{name}: bias must be {x.dtype} {(out,)}, got {bias.dtype} {tuple(bias.shape)}")
