"""Which Parameters are stacks of experts' weights, which of their dimensions is the input, and who can prune them."""

import inspect
import re
from functools import cache

from torch import nn

from ..methods import SparseMethod


def stacked_parameters(module: nn.Module) -> list[str]:
    """Names of the module's 3-D Parameters."""
    return [name for name, parameter in module._parameters.items() if parameter is not None and parameter.dim() == 3]


def is_stacked_experts(name: str, module: nn.Module) -> bool:
    """Whether a module, called `name`, holds weights of several experts as 3-D Parameters."""
    named_so = "expert" in type(module).__name__.lower() or "expert" in name.rpartition(".")[2]
    return named_so and bool(stacked_parameters(module))


def unsupported_method(method: SparseMethod) -> str | None:
    """Why a method cannot make stacked experts sparse, which have no layers of their own; None where it can."""
    gemms = method.gemms
    if gemms.output.estimator != "none":
        return "stacked experts: activations cannot be pruned"
    if any(gemm.precision != "native" for gemm in gemms):
        return "stacked experts: FP8 cannot be simulated"
    if gemms.grad_input.weight != gemms.output.weight:
        return f"stacked experts: method {method.name!r} multiplies by another weight in the backward pass"
    if method.overrides("adapt_output"):
        return f"stacked experts: method {method.name!r} adds to what a layer returns"
    return None


def gradient_note(method: SparseMethod) -> str | None:
    """How the gradients of stacked experts differ from those of the method's layers; None where they do not."""
    pruned = [gemm.estimator for gemm in method.gemms[1:] if gemm.estimator != "none"]
    return f"exact gradients, no {pruned[0]}" if pruned else None


def find_input_dim(module: nn.Module, name: str) -> int | None:
    """Which dimension of a 3-D Parameter is the input dimension, -1 or -2; None where that is not known.

    Transformers' `use_experts_implementation` says so in the attribute `is_transposed`. Other classes say it in their
    forward, by what multiplies by the Parameter.
    """
    transposed = getattr(module, "is_transposed", None)
    if isinstance(transposed, bool):
        return -2 if transposed else -1
    cls: type = module.__dict__.get("dense_class", type(module))
    return _input_dim_by_source(cls, name)


@cache
def _input_dim_by_source(cls: type, name: str) -> int | None:
    """`linear(x, W[e])` contracts the last dimension; `bmm(x, W)`, `matmul(x, W[e])` and `x @ W[e]` the one before, or
    the last of `W.transpose(1, 2)`."""
    try:
        source = inspect.getsource(cls.forward)  # type: ignore[attr-defined]  # every module has one
    except (OSError, TypeError):
        return None
    weight = rf"self\.{re.escape(name)}\b(?:\[\w+\])?"
    transpose = r"(?P<transposed>\.transpose\((?:1, 2|2, 1|-1, -2|-2, -1)\)|\.mT)?"
    argument = r"(?:[^(),]|\((?:[^()]|\([^()]*\))*\))+"
    uses = re.finditer(
        rf"(?P<function>\w+)\({argument},\s*{weight}{transpose}\s*[,)]|@\s*{weight}{transpose.replace('P<', 'P<at_')}",
        source,
    )
    dims = set()
    for use in uses:
        if use["function"] == "linear":
            dims.add(-2 if use["transposed"] else -1)
        elif use["function"] in ("bmm", "matmul", "mm", None):
            dims.add(-1 if use["transposed"] or use["at_transposed"] else -2)
    return dims.pop() if len(dims) == 1 else None
