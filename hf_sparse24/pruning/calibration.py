"""What the layers of a model are fed: the Gram matrices of their inputs, one block of the model after the other."""

from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..weight import SparseWeight, layer_name


class Gram:
    """`[X, 1]^T [X, 1]` of all inputs X that a layer got: `.matrix` `[in + 1, in + 1]`; `.tokens` is their number.

    fp32, or fp64 for an fp64 weight, on the weight's device.
    """

    def __init__(self, weight: SparseWeight):
        values = matrix(weight)
        size, dtype = values.shape[1] + 1, torch.promote_types(values.dtype, torch.float32)
        self.matrix = torch.zeros(size, size, dtype=dtype, device=values.device)
        self.tokens = 0

    def add(self, x: Tensor, attention_mask: Tensor | None) -> None:
        """Add inputs `[..., in]`, without those that the mask `[batch, length]` calls padding.

        Only where the shapes agree: an expert's share of the tokens, or relative positions, have no padding to skip.
        """
        rows = x.reshape(-1, x.shape[-1])
        if attention_mask is not None and x.shape[:-1] in (attention_mask.shape, (attention_mask.numel(),)):
            rows = rows[attention_mask.flatten().to(rows.device, torch.bool)]
        rows = nn.functional.pad(rows.to(self.matrix), (0, 1), value=1.0)
        self.matrix.addmm_(rows.t(), rows)
        self.tokens += len(rows)


def matrix(weight: SparseWeight) -> Tensor:
    """The weight as `[out, in]`, however it is stored: a view."""
    values, dim, _ = weight.view()
    return values if dim == 1 else values.t()


def check_batch(index: int, batch: Mapping[str, Tensor] | Tensor) -> dict[str, Tensor]:
    """A batch as keyword arguments of a model, without labels.

    Raises:
        ValueError: neither a dict of tensors nor a tensor of input_ids.
    """
    inputs = {"input_ids": batch} if isinstance(batch, Tensor) else batch
    if not isinstance(inputs, Mapping) or not all(isinstance(value, Tensor) for value in inputs.values()):
        found = {k: type(v).__name__ for k, v in inputs.items()} if isinstance(inputs, Mapping) else type(batch)
        raise ValueError(
            f"batch {index} of data is {found}: must be a dict of tensors, as a DataLoader with a collator gives, or "
            f"a tensor of input_ids"
        )
    return {name: value for name, value in inputs.items() if name != "labels"}


def calibrate(
    model: nn.Module, weights: dict[str, SparseWeight], batches: list[dict[str, Tensor]]
) -> Generator[dict[str, Gram], None, None]:
    """Yield, block by block in the order that blocks run, what the block's `weights` are multiplied with.

    The caller may change a block's weights before it asks for the next block, which then gets the outputs of the
    changed one. The first forward passes, over all batches, only find the order. The model is in eval mode until the
    iterator ends or is closed. Call it under `torch.no_grad`.

    Args:
        model: runs on every batch. weights: of linear layers by name, each inside some `nn.ModuleList`; a block is a
            member of the outermost one. batches: keyword arguments, see `check_batch`.

    Raises:
        ValueError: no token reaches one of the weights, or NaN or inf do.
    """
    blocks: dict[str, dict[str, SparseWeight]] = {}
    for name, weight in weights.items():
        blocks.setdefault(_block_of(model, name), {})[name] = weight
    total = len(batches) * (1 + len(blocks))
    with _evaluating(model), logging.tqdm(total=total, desc="calibration", unit="batch") as progress:
        order, calls = _survey(model, weights, list(blocks), batches, progress)
        for block in order:
            yield _collect(model, block, blocks[block], batches, [count[block] for count in calls], progress)


@contextmanager
def _evaluating(model: nn.Module):
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _block_of(model: nn.Module, name: str) -> str:
    parts = name.split(".")
    ends = (i for i in range(1, len(parts)) if isinstance(model.get_submodule(".".join(parts[:i])), nn.ModuleList))
    return ".".join(parts[: next(ends) + 1])


class _BlockDone(Exception):
    """Ends a forward pass that has gone far enough."""


def _run(model: nn.Module, batch: dict[str, Tensor]) -> None:
    device = next(model.parameters()).device
    with suppress(_BlockDone):
        model(**{name: value.to(device) for name, value in batch.items()})


def _survey(
    model: nn.Module,
    weights: dict[str, SparseWeight],
    blocks: list[str],
    batches: list[dict[str, Tensor]],
    progress: Any,
) -> tuple[list[str], list[Counter]]:
    """Run the model as it is: in which order do blocks run, and how often does each of them for every batch?"""
    reached: dict[str, None] = {}
    calls: list[Counter] = []
    with ExitStack() as hooks:
        for name, weight in weights.items():
            hook = weight.module.register_forward_pre_hook(lambda module, args, name=name: reached.setdefault(name))
            hooks.enter_context(hook)
        for block in blocks:
            hook = model.get_submodule(block).register_forward_hook(
                lambda module, args, output, block=block: calls[-1].update([block])
            )
            hooks.enter_context(hook)
        for batch in batches:
            calls.append(Counter())
            _run(model, batch)
            progress.update()
    _check_reached([name for name in weights if name not in reached])
    return list(dict.fromkeys(_block_of(model, name) for name in reached)), calls


def _collect(
    model: nn.Module,
    block: str,
    weights: dict[str, SparseWeight],
    batches: list[dict[str, Tensor]],
    calls: list[int],
    progress: Any,
) -> dict[str, Gram]:
    """The Gram matrices of a block's weights, from forward passes that end when the block has run `calls` times."""
    grams = {name: Gram(weight) for name, weight in weights.items()}
    attention_mask: Tensor | None = None
    left = 0

    def add(gram, args, kwargs):
        gram.add(args[0] if args else next(iter(kwargs.values())), attention_mask)

    def count_down(module, args, output):
        nonlocal left
        left -= 1
        if left == 0:
            raise _BlockDone

    with ExitStack() as hooks:
        for name, weight in weights.items():
            hook = weight.module.register_forward_pre_hook(
                lambda module, args, kwargs, gram=grams[name]: add(gram, args, kwargs), with_kwargs=True
            )
            hooks.enter_context(hook)
        hooks.enter_context(model.get_submodule(block).register_forward_hook(count_down))
        for batch, times in zip(batches, calls):
            mask, left = batch.get("attention_mask"), times
            attention_mask = mask if mask is not None and mask.dim() == 2 else None
            _run(model, batch)
            progress.update()
    _check_reached([name for name, gram in grams.items() if gram.tokens == 0])
    for name, gram in grams.items():
        if not gram.matrix.isfinite().all():
            raise ValueError(
                f"NaN or inf in the inputs of {layer_name(name)}: check the data, or load the model in another dtype"
            )
    return grams


def _check_reached(missing: list[str]) -> None:
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        shown = ", ".join(layer_name(name) for name in missing[:5])
        raise ValueError(
            f"no calibration tokens reach {shown}{more}; use more data, or leave them out with exclude_modules"
        )
