"""What the layers of a model are fed: statistics of their inputs, one block of the model after the other."""

import functools
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..progress import Progress
from ..weights.place import layer_name
from ..weights.sparse_weight import SparseWeight
from . import layerwise
from .replay import Batch, Course, Effect, Replay, warn_of_whole_passes


class Gram:
    """`[X, 1]^T [X, 1]` of all inputs X that a layer got: `.matrix` `[in + 1, in + 1]`; `.tokens` is their number.

    fp32, or fp64 for an fp64 weight, on the weight's device.
    """

    def __init__(self, weight: SparseWeight, batches: int):
        self.matrix = _zeros(weight, matrix(weight).shape[1] + 1, matrix(weight).shape[1] + 1)
        self.tokens = 0

    @property
    def squares(self) -> Tensor:
        """`[in]`: the sum of squares of each input."""
        return self.matrix.diagonal()[:-1]

    def summary(self, rows: Tensor) -> Tensor:
        """What is to be added for rows X `[tokens, in]`."""
        return _upper_product(_with_ones(rows))

    def add(self, summary: Any) -> None:
        self.matrix += summary

    def finish(self) -> None:
        """Mirror the upper triangle, which is all that was added to."""
        self.matrix.copy_(self.matrix.triu() + self.matrix.triu(1).t())

    def output_norm(self, change: Tensor) -> float:
        """`||[X, 1] change^T||_F`, for a change of weights and bias `[out, in + 1]`."""
        return layerwise.output_norm(change, self.matrix)


class Sample:
    """What masks by magnitude or by Wanda need, and some inputs to measure their errors on: much less than a `Gram`,
    with the same attributes but `matrix`."""

    ROWS = 128
    """Inputs that are kept, spread evenly over all batches."""

    def __init__(self, weight: SparseWeight, batches: int):
        self.squares = _zeros(weight, matrix(weight).shape[1])
        self.tokens = 0
        self._rows: list[Tensor] = []
        self._share = max(1, self.ROWS // batches)

    def summary(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        kept = rows[:: max(1, len(rows) // self._share)][: self._share]
        return torch.linalg.vector_norm(rows, dim=0).square(), _with_ones(kept)

    def add(self, summary: Any) -> None:
        squares, rows = summary
        self.squares += squares
        self._rows.append(rows)

    def finish(self) -> None:
        self._rows = [torch.cat(self._rows)] if self._rows else []

    def output_norm(self, change: Tensor) -> float:
        return torch.linalg.norm(self._rows[0] @ change.t()).item()


def _zeros(weight: SparseWeight, *sizes: int) -> Tensor:
    values = matrix(weight)
    return torch.zeros(sizes, dtype=torch.promote_types(values.dtype, torch.float32), device=values.device)


class _LastInput:
    """The summary of the input that some layer got last: others often get the same, as query, key and value do."""

    def __init__(self, attention_mask: Tensor | None):
        self.attention_mask = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
        self.x: Tensor | None = None
        self.version = self.tokens = 0
        self.dtype: torch.dtype | None = None
        self.summary: Any = None

    def add_to(self, statistics: Gram | Sample, x: Tensor) -> None:
        """Add inputs `[..., in]`, without those that the attention mask `[batch, length]` calls padding.

        Only where the shapes agree: an expert's share of the tokens, or relative positions, have no padding to skip.
        """
        if x is not self.x or x._version != self.version or self.dtype != statistics.squares.dtype:
            rows, mask = x.reshape(-1, x.shape[-1]), self.attention_mask
            if mask is not None and x.shape[:-1] in (mask.shape, (mask.numel(),)):
                rows = rows[mask.flatten().to(rows.device, torch.bool)]
            rows = rows.to(statistics.squares)
            self.x, self.version, self.dtype = x, x._version, rows.dtype
            self.tokens, self.summary = len(rows), statistics.summary(rows)
        statistics.add(self.summary)
        statistics.tokens += self.tokens


def _with_ones(rows: Tensor) -> Tensor:
    return nn.functional.pad(rows, (0, 1), value=1.0)


def _upper_product(rows: Tensor, parts: int = 8) -> Tensor:
    """`rows^T rows`, and zeros in most of its lower triangle: in 8 parts that is 9/16 of the work."""
    product = rows.new_zeros(rows.shape[1], rows.shape[1])
    for columns in torch.arange(rows.shape[1]).chunk(parts):
        start, end = int(columns[0]), int(columns[-1]) + 1
        torch.mm(rows[:, start:end].t(), rows[:, start:], out=product[start:end, start:])
    return product


def matrix(weight: SparseWeight) -> Tensor:
    """The weight as `[out, in]`, however it is stored: a view."""
    return weight.out_in(weight.views()[0].matrix)


def check_batch(index: int, batch: Mapping[str, Tensor] | Tensor) -> Batch:
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
    model: nn.Module, weights: dict[str, SparseWeight], batches: list[Batch], kind: type[Gram | Sample]
) -> Generator[dict[str, Gram | Sample], None, None]:
    """Yield, block by block in the order that blocks run, what the block's `weights` are multiplied with.

    The caller may change a block's weights before it asks for the next block, which then gets the outputs of the
    changed one, and not later. The model is in eval mode until the iterator ends or is closed. Call it under
    `torch.no_grad`.

    Args:
        model: runs on every batch. weights: of linear layers by name, each inside some `nn.ModuleList`; a block is a
            member of the outermost one. batches: keyword arguments, see `check_batch`. All with the same names must
            run the same blocks in the same order, which a first pass finds from one of them. kind: of statistics.

    Raises:
        ValueError: no token reaches one of the weights, or NaN or inf do; batches differ in the blocks that they run.
    """
    blocks: dict[str, dict[str, SparseWeight]] = {}
    for name, weight in weights.items():
        blocks.setdefault(_block_of(model, name), {})[name] = weight
    unpruned = set(weights)
    found: dict[str, Gram | Sample] = {}
    effects: list[list[Effect]] = [[] for _ in batches]
    total = len(batches) * len(blocks)

    def before_layer(name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if name in unpruned:
            replay.final = False
        if name in found:
            last_input.add_to(found[name], args[0] if args else next(iter(kwargs.values())))

    progress = Progress("calibration", total, "batch")
    with progress, _evaluating(model), Replay(model) as replay:
        order, courses = _survey(replay, blocks, batches)
        with ExitStack() as hooks:
            for name, weight in weights.items():
                hook = functools.partial(before_layer, name)
                hooks.enter_context(weight.module.register_forward_pre_hook(hook, with_kwargs=True))
            for block in order:
                found = {name: kind(weight, len(batches)) for name, weight in blocks[block].items()}
                for batch, kept in zip(batches, effects):
                    course = courses[frozenset(batch)]
                    if course.last_use is None or block in course.ends:
                        last_input = _LastInput(batch.get("attention_mask"))
                        replay.run(batch, course, kept, course.ends.get(block))
                    progress.update()
                _check(found)
                for statistics in found.values():
                    statistics.finish()
                yield found
                unpruned -= found.keys()


@contextmanager
def _evaluating(model: nn.Module):
    """In eval mode, and without the caches for generation that Transformers then makes."""
    modes = {module: module.training for module in model.modules()}
    configs = [config for config in (getattr(module, "config", None) for module in modes) if config is not None]
    caching = [config for config in configs if getattr(config, "use_cache", False) is True]
    model.eval()
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for config in caching:
            config.use_cache = True


def _block_of(model: nn.Module, name: str) -> str:
    parts = name.split(".")
    ends = (i for i in range(1, len(parts)) if isinstance(model.get_submodule(".".join(parts[:i])), nn.ModuleList))
    return ".".join(parts[: next(ends) + 1])


def _survey(
    replay: Replay, blocks: dict[str, dict[str, SparseWeight]], batches: list[Batch]
) -> tuple[list[str], dict[frozenset[str], Course]]:
    """In which order do the blocks with weights run, and how does a pass go over batches with the same names?"""
    reached: dict[str, None] = {}
    courses: dict[frozenset[str], Course] = {}
    layers = [(weight.module, block) for block, weights in blocks.items() for weight in weights.values()]
    with ExitStack() as hooks:
        for module, block in [*replay.blocks.items(), *layers]:
            hook = module.register_forward_pre_hook(lambda module, args, block=block: reached.setdefault(block))
            hooks.enter_context(hook)
        for batch in batches:
            if frozenset(batch) not in courses:
                courses[frozenset(batch)] = replay.study(batch)
    _check_reached([name for block, weights in blocks.items() if block not in reached for name in weights])
    in_parts = [block for block in reached if all(block not in course.ends for course in courses.values())]
    if in_parts:
        warn_of_whole_passes(f"it runs parts of {in_parts[0]}, and not the whole")
        courses = {names: replace(course, last_use=None) for names, course in courses.items()}
    return [block for block in reached if block in blocks], courses


def _check(found: Mapping[str, Gram | Sample]) -> None:
    _check_reached([name for name, statistics in found.items() if statistics.tokens == 0])
    for name, statistics in found.items():
        if not statistics.squares.isfinite().all():
            raise ValueError(
                f"NaN or inf in the inputs of {layer_name(name)}: check the data, or load the model in another dtype"
            )


def _check_reached(missing: list[str]) -> None:
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        shown = ", ".join(layer_name(name) for name in missing[:5])
        raise ValueError(
            f"no calibration tokens reach {shown}{more}; use more data, or leave them out with exclude_modules"
        )
