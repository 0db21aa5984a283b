"""Sizes of a model, as the formulas of `costs.py` and `pruning_costs.py` take them: its Parameters, linear layers and
buffers, and where tensor parallelism communicates. The model may be on the meta device."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..weights.sparse_weight import SparseWeight, sparse_weights
from .costs import TP_STYLES, Boundary, Leaf

PARALLEL = ("ddp", "fsdp2", "tp")


@dataclass(frozen=True)
class Setting:
    """How the model is trained.

    Attributes:
        gpus: processes, one per GPU.
        tokens: of one optimizer step in a GPU, in one micro-batch. With tensor parallelism all GPUs work on the same.
        parallel: one of `PARALLEL`.
        dtype: of GEMMs, activations, and what FSDP2 gathers.
        checkpointing: whether layers run again in the backward pass.
    """

    gpus: int
    tokens: int
    parallel: str = "ddp"
    dtype: torch.dtype = torch.bfloat16
    checkpointing: bool = False


class Part(NamedTuple):
    """A linear layer, or a stack of experts, as one process has it.

    Attributes:
        group: the transformer layer that it is in, None outside these.
        out, inputs: sizes of the matrix, or of each in a stack.
        matrices: how many the stack has.
        token_share: the share of a step's tokens that each matrix sees.
        weight: the sparse weight; None for a dense one.
    """

    group: str | None
    out: int
    inputs: int
    matrices: int
    token_share: float
    weight: SparseWeight | None


def _groups(model: PreTrainedModel) -> list[str]:
    """Names of the modules that FSDP2 gathers one by one, as accelerate wraps them."""
    classes = set(model._no_split_modules or ())
    return [name for name, module in model.named_modules() if type(module).__name__ in classes]


def _owner(name: str, groups: list[str]) -> str | None:
    return next((group for group in groups if name.startswith(f"{group}.")), None)


def _style(model: PreTrainedModel, module: str) -> str | None:
    """Transformers' tensor-parallel style of a module."""
    return (model.tp_plan or {}).get(re.sub(r"\d+", "*", module))


def leaves(model: PreTrainedModel) -> dict[str, Leaf]:
    """All Parameters by name, shared ones once."""
    groups = _groups(model)
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    found = {}
    for name, parameter in model.named_parameters():
        module, _, own = name.rpartition(".")
        style = _style(model, module)
        if style == "replicated_with_grad_allreduce" or (style == "rowwise" and own == "bias"):
            style = None
        # torch gives the gradient of a lookup in a split table whole, unless a split lm_head adds its own to it.
        grad_is_whole = style == "embedding_rowwise" and uses[id(parameter)] == 1
        found[name] = Leaf(tuple(parameter.shape), _owner(name, groups), style, grad_is_whole)
    return found


def parts(model: PreTrainedModel, setting: Setting) -> Iterator[Part]:
    """The linear layers and stacks of experts, in module order."""
    groups, sparse = _groups(model), {id(weight.parameter): weight for weight in sparse_weights(model).values()}
    chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 1
    ranks = setting.gpus if setting.parallel == "tp" else 1
    for prefix, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            weight, name = sparse.get(id(parameter)), f"{prefix}.{own}"
            is_stack = parameter.dim() == 3
            if not is_stack and not (isinstance(module, nn.Linear | Conv1D) and own == "weight"):
                continue
            if weight is not None:
                out, inputs = weight.sizes
            else:
                out, inputs = parameter.shape[-2:] if not isinstance(module, Conv1D) else parameter.shape[::-1]
            style = _style(model, prefix) if ranks > 1 else None
            if style == "rowwise":
                inputs //= ranks
            elif style is not None:
                out //= ranks
            count = len(parameter) if is_stack else 1
            yield Part(_owner(name, groups), out, inputs, count, min(1.0, chosen / count) if is_stack else 1.0, weight)


def buffer_bytes(model: PreTrainedModel, setting: Setting) -> int:
    """Bytes of all buffers of a process. FSDP2 leaves them whole; tensor parallelism splits masks like weights."""
    total = sum(buffer.nbytes for buffer in model.buffers())
    if setting.parallel != "tp":
        return total
    split = split_state_bytes(model)
    return total - split + split // setting.gpus


def split_state_bytes(model: PreTrainedModel) -> int:
    """Bytes of the state that tensor parallelism splits: tensors with the dimensions of their weight."""
    return sum(
        tensor.nbytes
        for name, weight in sparse_weights(model).items()
        if _style(model, name.rpartition(".")[0])
        for tensor in weight.state.values()
        if tensor.dim() == weight.parameter.dim()
    )


def boundaries(model: PreTrainedModel, setting: Setting) -> Iterator[Boundary]:
    """The modules at which tensor parallelism communicates."""
    groups = _groups(model)
    last: dict[str | None, str] = {}  # a layer is repeated up to its last GEMM, and what follows it is not
    modules = {name: style for name, _ in model.named_modules() if (style := _style(model, name))}
    for name, style in modules.items():
        if style == "rowwise":
            last[_owner(name, groups)] = name
    for name, style in modules.items():
        group, shape = _owner(name, groups), model.get_parameter(f"{name}.weight").shape
        if style == "replicated_with_grad_allreduce":
            yield Boundary(style, 0, 0, grad_elements=shape.numel())
        elif style == "embedding_rowwise":
            yield Boundary(style, 0, shape[1])
        else:
            runs_again = setting.checkpointing and group is not None and last.get(group) != name
            yield Boundary(style, inputs=shape[1], out=shape[0], runs_again=runs_again)


def check_tp(model: PreTrainedModel, ranks: int) -> None:
    """Raise ValueError where tensor parallelism over `ranks` processes cannot be, or is not known here."""
    config = model.config.get_text_config()
    if not model.tp_plan:
        raise ValueError(f"Transformers has no tensor-parallel plan for {type(model).__name__}; use fsdp2")
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None) or ranks
        if heads % ranks:
            raise ValueError(f"tp over {ranks} GPUs: {key}={heads} does not divide by {ranks}; take fewer GPUs")
    unknown = {style for name, _ in model.named_modules() if (style := _style(model, name))} - set(TP_STYLES)
    if unknown:
        raise ValueError(
            f"{type(model).__name__} is split by {sorted(unknown)}, whose communication is not known here; use fsdp2"
        )
    sparse = sparse_weights(model)
    for name, leaf in leaves(model).items():
        dim = len(leaf.shape) - 1 if leaf.style == "rowwise" else 0
        unit = 1
        if leaf.style and name in sparse:  # groups along the input, tiles along the output, bytes of packed masks
            m = sparse[name].method.pattern.m
            unit = math.lcm(m, 8) if dim else m
        if leaf.style and leaf.shape[dim] % (ranks * unit):
            parts = "equal parts" if unit == 1 else f"parts of whole groups, multiples of {unit}"
            raise ValueError(
                f"tp over {ranks} GPUs: {name} {list(leaf.shape)} cannot be split in {parts} along dimension {dim}; "
                f"take fewer GPUs" + ("" if unit == 1 else ", or leave the layer dense with exclude_modules")
            )
