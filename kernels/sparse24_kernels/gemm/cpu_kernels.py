"""A 2:4 matrix times a dense one on a CPU in fp32, by kernels that skip zeros: the operators, and their time.

The 2:4 matrix is one tensor, a packed one of `formats.FORMS`.
"""

import torch
from torch import Tensor

from ..cpu.library import loaded
from ..cpu.limits import FP32, in_turns
from ..dispatch import choose_kernels, implementation
from ..first_use import device_name
from ..formats import OPERAND_MULTIPLE, split_operand
from ..operators import not_differentiable, register
from ..prune import prune_forms
from .packed import packed_linear
from .problem import GemmProblem

ROUNDS = 7

FASTER_FROM = {("AMD", "avx512_bf16"): 512, ("AMD", "avx512"): 512, ("AMD", "avx2"): 512}
"""The size from which on all three GEMMs of training are faster than dense math, by the CPU's vendor and path: tokens,
outputs and inputs at least as many. Measured with packing, on Zen 4 and 5, against what torch runs there (MKL)."""


@register("sparse24::packed_mm", lambda values, mask, dense: dense.new_empty(len(values), dense.shape[1]))
def packed_mm(values: Tensor, mask: Tensor, dense: Tensor) -> Tensor:
    """A packed 2:4 `[R, K]` times `[K, N]` -> `[R, N]`."""
    return implementation("packed_mm", dense)(values, mask, dense)


def compress(matrix: Tensor) -> Tensor:
    """The operand that `linear` and `mm` multiply by, of a 2:4 `[m, k]` that is row-major or the transpose of such."""
    if matrix.t().is_contiguous():
        return prune_forms(matrix.t(), ["packed-transposed"], dim=0)[0]
    return prune_forms(matrix, ["packed"])[0]


def linear(x: Tensor, operand: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear(x, matrix, bias)`, x `[..., k]`."""
    values, mask = split_operand(operand)
    return packed_linear(x.reshape(-1, x.shape[-1]), values, mask, None, 4, bias).view(*x.shape[:-1], len(values))


def mm(operand: Tensor, dense: Tensor) -> Tensor:
    """`matrix @ dense`."""
    return not_differentiable(packed_mm, *split_operand(operand), dense)


@torch.compiler.assume_constant_result  # Dynamo keeps the answer: it could not trace the cache
def unsupported_device(device: torch.device) -> str | None:
    """Why the kernels cannot run on `device`, or None where they can."""
    choice = choose_kernels(device, torch.float32, operator="packed_mm")
    return None if choice.implementation == "cpu" else choice.reason


@torch.compiler.assume_constant_result  # as above
def faster_from() -> int | None:
    """The size of `FASTER_FROM` on this CPU; None where nothing is known of its kind."""
    return FASTER_FROM.get((device_name(torch.device("cpu")).partition(" ")[0], loaded().path))


def unsupported_matrix(k: int, dtype: torch.dtype) -> str | None:
    """Why a 2:4 matrix with `k` columns is not multiplied, or None where it is."""
    if dtype != torch.float32:
        return f"the sparse GEMMs of CPUs run in fp32, not {dtype}"
    return f"a CPU contracts multiples of {OPERAND_MULTIPLE} only" if k % OPERAND_MULTIPLE or not k else None


@torch.no_grad()
def times(problem: GemmProblem) -> tuple[float, float]:
    """Microseconds of the sparse GEMM, with packing its operand, and of the dense one: medians, taken in turns."""
    matrix, columns = (torch.randn(rows, problem.k, **FP32) for rows in (problem.m, problem.n))
    matrix.unflatten(1, (-1, 4))[..., 2:] = 0
    rows = columns.t().contiguous()
    return in_turns(
        lambda: linear(columns, compress(matrix), None) if problem.transposed else mm(compress(matrix), rows),
        lambda: torch.nn.functional.linear(columns, matrix) if problem.transposed else matrix @ rows,
        ROUNDS,
    )
