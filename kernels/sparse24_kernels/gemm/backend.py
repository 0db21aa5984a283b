"""The protocol of GEMM backends, their operand, the plan that carries it, and the registry that users extend.

A backend is one file and one registration; docs/guides/own_kernel.md has an example.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..cache_folder import ON_CHANGE
from ..checks import check_is
from ..dispatch import implementation
from ..formats import Packed
from .problem import GemmProblem


class Operand(NamedTuple):
    """A 2:4 matrix `[m, k]` in the form that one backend multiplies by: dense math by its values, cuSPARSELt by the
    compressed matrix as values, `"packed"` by what a `Packed` has."""

    values: Tensor
    mask: Tensor | None = None
    scale: Tensor | None = None
    m: int = 4


@torch.library.custom_op("sparse24::unpack_nm", mutates_args=())
def unpack(values: Tensor, mask: Tensor, scales: Tensor | None = None, m: int = 4) -> Tensor:
    """The dense `[R, K]` of values `[R, K*N/M]`, a mask `[R, K/8]` and, of int8 values, scales `[R, ceil(K/128)]`."""
    return implementation("unpack_nm", mask)(values, mask, scales, m)


@unpack.register_fake
def _(values: Tensor, mask: Tensor, scales: Tensor | None = None, m: int = 4) -> Tensor:
    return (values if scales is None else scales).new_empty(mask.shape[0], mask.shape[1] * 8)


class GemmBackend(Protocol):
    """Runs GEMMs with one 2:4 operand, whichever matrix that is: a weight, its transpose, or a pruned gradient.

    Subclass it and write `name` (what users choose it by), `plan` and `linear`; the other methods have defaults. What
    torch.compile should trace has to be traceable: wrap foreign code in operators with fakes.
    """

    name: str

    def __repr__(self) -> str:
        return f"<backend {self.name!r}>"

    def unsupported(self, device: torch.device) -> str | None:
        """Why this backend runs nothing on a device.

        Args:
            device: where the operands are.

        Returns:
            The reason in words; None where some GEMMs run.
        """
        return None

    def plan(self, problem: GemmProblem, device: torch.device, requested: bool) -> "GemmPlan | str":
        """A plan of a GEMM that carries this backend, or the reason in words why it does not run it.

        Args:
            problem: n may be symbolic while torch.compile traces.
            device: one that `unsupported` has nothing against.
            requested: the user chose this backend by name. Otherwise `"auto"` asks, and a backend refuses a problem
                that dense math runs faster.

        Returns:
            The plan, or the reason.
        """
        ...

    def encode(self, matrix: Tensor | Packed) -> Operand:
        """The operand that `linear` and `mm` take, of a 2:4 matrix. The default keeps it dense.

        Args:
            matrix: `[m, k]`, dense (any strides, never -0.0) or packed.

        Returns:
            The operand. Models take backends that store one tensor.
        """
        return Operand(unpack(*matrix) if isinstance(matrix, Packed) else matrix)

    def linear(self, x: Tensor, weight: Operand, bias: Tensor | None, plan: "GemmPlan") -> Tensor:
        """`F.linear(x, weight, bias)`, the GEMM of a problem that is `transposed`.

        Args:
            x: `[..., k]`, any strides.
            weight: `[m, k]`, as `encode` stores it.
            bias: `[m]`, or None.
            plan: the plan that was made for it.

        Returns:
            `[..., m]`, row-major, in the dtype of `x`.
        """
        ...

    def mm(self, sparse: Operand, dense: Tensor, plan: "GemmPlan") -> Tensor:
        """`sparse @ dense`, the GEMM of a problem that is not `transposed`.

        Args:
            sparse: `[m, k]`, as `encode` stores it.
            dense: `[k, n]`, any strides.
            plan: the plan that was made for it.

        Returns:
            `[m, n]`, row-major, in the dtype of `dense`.

        Raises:
            NotImplementedError: `plan` accepted such a problem without this method.
        """
        reason = f"backend={self.name!r} planned a GEMM that it has no method for"
        raise NotImplementedError(reason)  # raised directly, a text would make the method abstract for mypy


class GemmPlan(NamedTuple):
    """How one GEMM runs, and why.

    Attributes:
        backend: what encodes the sparse operand and runs the GEMM.
        reason: in words, with the measured times where there are any.
        algorithm: the library's number for it, for backends that have several. What it means depends on the library's
            version and the device.
        form: of `formats.FORMS`, in which pruning makes the operand `[m, k]`. `linear` and `mm` take it as it is, but
            `"dense"`, which goes through `encode`.
    """

    backend: GemmBackend
    reason: str
    algorithm: int | None = None
    form: str = "dense"

    @property
    def is_sparse(self) -> bool:
        """Whether the backend takes an encoded operand; dense math takes the pruned matrix as it is."""
        return self.backend.name != "dense"


class DenseBackend(GemmBackend):
    """Dense math on the pruned values, with their zeros, on any device and in any dtype."""

    name = "dense"

    def plan(self, problem: GemmProblem, device: torch.device, requested: bool) -> GemmPlan | str:
        return GemmPlan(self, "dense math runs everywhere")

    def linear(self, x: Tensor, weight: Operand, bias: Tensor | None, plan: GemmPlan) -> Tensor:
        # F.linear, so that a model gives the same bits before and after its layers are unpatched.
        return torch.nn.functional.linear(x, weight.values, bias)

    def mm(self, sparse: Operand, dense: Tensor, plan: GemmPlan) -> Tensor:
        return sparse.values @ dense


DENSE = DenseBackend()

_backends: dict[str, GemmBackend] = {DENSE.name: DENSE}
AUTOMATIC: dict[str, GemmBackend] = {}
"""Backends that `"auto"` asks, in order. Dense math, which refuses nothing, comes after all of them."""


def register_backend(backend: GemmBackend, *, auto: bool = False) -> None:
    """Make a backend available as `backend="name"`, in `plan_gemm` and in models.

    Args:
        backend: an object with the methods of `GemmBackend`. It replaces one of the same name.
        auto: whether `"auto"` asks it too, after those that are registered already and before dense math.

    Raises:
        ValueError: its name is no string, `"auto"` or `"dense"`.
    """
    check_is(bool, "register_backend", auto=auto)
    name = getattr(backend, "name", None)
    if not isinstance(name, str) or name in ("", "auto", DENSE.name):
        raise ValueError(f"register_backend: backend.name={name!r}: must be a name other than 'auto' and 'dense'")
    for known in (_backends, AUTOMATIC):  # one that is registered again is the last
        known.pop(name, None)
    _backends[name] = backend
    if auto:
        AUTOMATIC[name] = backend
    for forget in ON_CHANGE:  # plans that are kept
        forget()


def backend_names() -> list[str]:
    """Names that can be requested; `"auto"` is not among them."""
    return list(_backends)


def find_backend(name: str, device: torch.device) -> GemmBackend:
    backend = _backends.get(name) if isinstance(name, str) else None
    if backend is None:
        raise ValueError(f"backend={name!r} is not available; choose 'auto' or one of {backend_names()}")
    if reason := backend.unsupported(device):
        raise ValueError(f"backend={name!r}: {reason}; use 'auto'")
    return backend


def encode_one(backend: GemmBackend, matrix: Tensor, form: str) -> Tensor:
    """A pruned matrix in a form as the backend stores it, for callers that keep one tensor."""
    if form not in ("dense", "transposed"):
        return matrix
    values, mask, scale, _ = backend.encode(matrix)
    if mask is not None or scale is not None:
        name = f"backend={backend.name!r}"
        raise ValueError(f"{name} stores several tensors: a model keeps one; call compress(matrix, plan) yourself")
    return values
