"""What the layers of a model are fed: the Gram matrices of their inputs, one block of the model after the other."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .linear import Sparse24Layer


class Gram:
    """`[X, 1]^T [X, 1]` of all inputs X that a layer got: `.matrix` `[in + 1, in + 1]`; `.tokens` is their number.

    fp32, or fp64 for an fp64 weight, on the weight's device.
    """

    def __init__(self, layer: Sparse24Layer):
        size = matrix(layer).shape[1] + 1
        dtype = torch.promote_types(layer.weight.dtype, torch.float32)
        self.matrix = torch.zeros(size, size, dtype=dtype, device=layer.weight.device)
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


def matrix(layer: Sparse24Layer) -> Tensor:
    """The weight as `[out, in]`, whatever the layer's layout: a view."""
    return layer.weight if layer.input_dim == 1 else layer.weight.t()


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
    model: nn.Module, layers: dict[str, Sparse24Layer], batches: list[dict[str, Tensor]]
) -> Iterator[dict[str, Gram]]:
    """Yield, block by block in the order that blocks run, what the block's `layers` are fed.

    The caller may change a block's layers before it asks for the next block, which then gets the changed one's outputs.
    The first forward passes, over all batches, only find the order. The model is in eval mode until the iterator ends
    or is closed. Call it under `torch.no_grad`.

    Args:
        model: runs on every batch. layers: by name, each inside some `nn.ModuleList`; a block is a member of the
            outermost one. batches: keyword arguments, see `check_batch`.

    Raises:
        ValueError: no token reaches one of the layers, or NaN or inf do.
    """
    blocks: dict[str, dict[str, Sparse24Layer]] = {}
    for name, layer in layers.items():
        blocks.setdefault(_block_of(model, name), {})[name] = layer
    total = len(batches) * (1 + len(blocks))
    with _evaluating(model), logging.tqdm(total=total, desc="calibration", unit="batch") as progress:
        order, calls = _survey(model, layers, list(blocks), batches, progress)
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


def _survey(model, layers, blocks, batches, progress) -> tuple[list[str], list[Counter]]:
    """Run the model as it is: in which order do blocks run, and how often does each of them for every batch?"""
    reached, calls = {}, []
    with ExitStack() as hooks:
        for name, layer in layers.items():
            hook = layer.register_forward_pre_hook(lambda module, args, name=name: reached.setdefault(name))
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
    _check_reached([name for name in layers if name not in reached])
    return list(dict.fromkeys(_block_of(model, name) for name in reached)), calls


def _collect(model, block, layers, batches, calls, progress) -> dict[str, Gram]:
    """The Gram matrices of a block's layers, from forward passes that end when the block has run `calls` times."""
    grams = {name: Gram(layer) for name, layer in layers.items()}
    attention_mask, left = None, 0

    def add(gram, args, kwargs):
        gram.add(args[0] if args else next(iter(kwargs.values())), attention_mask)

    def count_down(module, args, output):
        nonlocal left
        left -= 1
        if left == 0:
            raise _BlockDone

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hook = layer.register_forward_pre_hook(
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
            raise ValueError(f"NaN or inf in the inputs of {name}: check the data, or load the model in another dtype")
    return grams


def _check_reached(missing: list[str]) -> None:
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ValueError(
            f"no calibration tokens reach {', '.join(missing[:5])}{more}; use more data, or leave them out with "
            f"exclude_modules"
        )
