"""What a plan reads from a model: its linear layers, stacks of experts, and which transformer layer each is in. The
model may be on the meta device."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..patching.stacks import stacked_parameters
from ..weights.input_dim import find_input_dim
from ..weights.sparse_weight import SparseWeight, sparse_weights


@dataclass(frozen=True)
class Setting:
    """How the model is trained.

    Attributes:
        gpus: processes, one per GPU.
        tokens: of one optimizer step in a GPU, in one micro-batch.
        parallel: `"ddp"` or `"fsdp2"`.
        dtype: of GEMMs, activations, and what FSDP2 gathers.
        checkpointing: whether layers run again in the backward pass.
    """

    gpus: int
    tokens: int
    parallel: str = "ddp"
    dtype: torch.dtype = torch.bfloat16
    checkpointing: bool = False


class Part(NamedTuple):
    """A linear layer, or a stack of experts.

    Attributes:
        block: the transformer layer that it is in, None outside these.
        out, inputs: sizes of the matrix, or of each in a stack.
        matrices: how many the stack has.
        token_share: the share of a step's tokens that each matrix sees.
        weight: the sparse weight; None for a dense one.
    """

    block: str | None
    out: int
    inputs: int
    matrices: int
    token_share: float
    weight: SparseWeight | None


def blocks(model: PreTrainedModel) -> dict[str, str | None]:
    """The transformer layer that each Parameter is in, by name; None for one outside.

    FSDP2 gathers these layers one by one, as accelerate wraps them. A model that does not name their classes, as Marian
    does not, has them in its ModuleLists.
    """
    classes = set(model._no_split_modules or ())
    names = [name for name, module in model.named_modules() if type(module).__name__ in classes]
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    names = names or [f"{name}.{key}" for name, module in lists for key, _ in module.named_children()]
    return {
        parameter: next((name for name in names if parameter.startswith(f"{name}.")), None)
        for parameter, _ in model.named_parameters()
    }


def parts(model: PreTrainedModel) -> Iterator[Part]:
    """The linear layers and stacks of experts, in module order."""
    block, sparse = blocks(model), {id(weight.parameter): weight for weight in sparse_weights(model).values()}
    chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 1
    for prefix, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            is_stack = own in stacked_parameters(prefix, module)
            if not is_stack and not (isinstance(module, nn.Linear | Conv1D) and own == "weight"):
                continue
            weight = sparse.get(id(parameter))
            out, inputs = parameter.shape[-2:] if find_input_dim(module, own) != -2 else parameter.shape[:-3:-1]
            count = len(parameter) if is_stack else 1
            share = min(1.0, chosen / count) if is_stack else 1.0
            yield Part(block.get(f"{prefix}.{own}"), out, inputs, count, share, weight)


def sharded(parameter: Tensor, ranks: int) -> int:
    """Elements that the first of `ranks` processes holds with FSDP2: its part of the first dimension, to which the
    others pad."""
    if not parameter.dim():  # CLIP's logit_scale
        return 1
    return -(-len(parameter) // ranks) * parameter[:1].numel()
