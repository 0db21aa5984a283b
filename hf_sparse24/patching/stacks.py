"""Which Parameters are stacks of experts' weights, and which methods can prune them."""

from torch import nn

from ..methods import SparseMethod


def stacked_parameters(name: str, module: nn.Module) -> list[str]:
    """Return the names of the 3-D Parameters of a module, called `name`, that holds experts' weights."""
    if "expert" not in type(module).__name__.lower() and "expert" not in name.rpartition(".")[2]:
        return []
    return [key for key, parameter in module._parameters.items() if parameter is not None and parameter.dim() == 3]


def unsupported_method(method: SparseMethod) -> str | None:
    """Return why a method cannot make stacked experts sparse, which have no layers of their own; None if it can."""
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
