"""Which dimension of a weight is the input dimension, in whose groups N:M prunes."""

from torch import nn
from transformers.pytorch_utils import Conv1D

STACKS = {"Llama4TextExperts": -2}
STACKS |= dict.fromkeys(("InklingSharedExperts", "JetMoeParallelExperts", "LongcatFlashExperts", "Step3p7Experts"), -1)
"""Input dimensions by the class of a stack of experts. Transformers' other stacks have the attribute is_transposed."""


def input_dim_of(layer: nn.Module) -> int:
    """Return the input dimension of a linear layer's weight: -1 or -2."""
    return -2 if isinstance(layer, Conv1D) else -1


def find_input_dim(module: nn.Module, name: str = "weight") -> int | None:
    """Return the input dimension of a weight, -1 or -2; None where a stack does not say how it multiplies."""
    if isinstance(module, nn.Linear | Conv1D):
        return input_dim_of(module)
    parameter = module._parameters.get(name)
    if parameter is None or parameter.dim() != 3:
        return None
    transposed = getattr(module, "is_transposed", None)
    if isinstance(transposed, bool):
        return -2 if transposed else -1
    return STACKS.get(module.__dict__.get("dense_class", type(module)).__name__)
