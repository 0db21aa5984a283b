"""Statistics of a layer's inputs: all that pruning needs to know of the data."""

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..weights.sparse_weight import SparseWeight
from .replay import Replay


class Gram:
    """The Gram matrix `[X, 1]^T [X, 1]` of a layer's inputs X: `[in + 1, in + 1]`, fp32, or fp64 for an fp64 weight."""

    def __init__(self, weight: SparseWeight, batches: int):
        size = matrix(weight).shape[1] + 1
        self.matrix = _zeros(weight, size, size)
        self.tokens = 0

    @property
    def squares(self) -> Tensor:
        """Sum of squares of each input, `[in]`."""
        return self.matrix.diagonal()[:-1]

    def summary(self, rows: Tensor) -> Tensor:
        return _upper_product(_with_ones(rows))

    def add(self, summary: Any) -> None:
        self.matrix += summary

    def finish(self) -> None:
        """Mirror the upper triangle; `summary` leaves most of the lower one at zero."""
        self.matrix.copy_(self.matrix.triu() + self.matrix.triu(1).t())

    def output_norm(self, change: Tensor) -> float:
        """Return `||[X, 1] change^T||_F` for a change of weights and bias `[out, in + 1]`."""
        return ((change @ self.matrix) * change).sum().clamp(min=0).sqrt().item()


class InputNorms:
    """Sums of squares of a layer's inputs, and 128 of the inputs to measure errors on: much cheaper than a `Gram`."""

    ROWS = 128  # spread evenly over all batches

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


Statistics = Gram | InputNorms


class InputHooks:
    """Hooks before the layers to prune, which measure their inputs. Layers share inputs: query, key and value do."""

    def __init__(self, replay: Replay, weights: dict[str, SparseWeight], stack: ExitStack):
        self.replay, self.unpruned = replay, set(weights)
        self._statistics: dict[str, Statistics] | None = None
        self._x: Tensor | None = None
        self._key: object = None
        for name, weight in weights.items():
            hook = functools.partial(self._before_layer, name)
            stack.enter_context(weight.module.register_forward_pre_hook(hook, with_kwargs=True))

    @contextmanager
    def measuring(self, statistics: dict[str, Statistics], masks: list[Tensor]) -> Iterator[None]:
        """Add inputs `[..., in]` to the layers' statistics, but for the padding that masks `[batch, length]` show."""
        self._statistics, self._masks, self._x = statistics, masks, None
        yield
        self._statistics = self._x = None

    def _before_layer(self, name: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._statistics is None:
            return
        if name in self.unpruned:
            self.replay.final = False
        if name not in self._statistics:
            return
        x, statistics = args[0] if args else next(iter(kwargs.values())), self._statistics[name]
        key = (x._version, statistics.squares.dtype)
        if x is not self._x or key != self._key:
            rows, counts = x.reshape(-1, x.shape[-1]), counted(self._masks, x)
            rows = (rows if counts is None else rows[counts.flatten()]).to(statistics.squares)
            self._x, self._key, self._tokens = x, key, len(rows)
            with torch.autocast(rows.device.type, enabled=False):
                self._summary = statistics.summary(rows)
        statistics.add(self._summary)
        statistics.tokens += self._tokens


def padding_masks(batch: Mapping[str, Tensor]) -> list[Tensor]:
    """Return a batch's padding masks, `[batch, length]` each; an encoder-decoder has two sequences."""
    masks = [batch[name] for name in ("attention_mask", "decoder_attention_mask") if name in batch]
    if "labels" in batch:  # an encoder-decoder reads them; -100 is where its loss has no target
        masks.append(batch["labels"] != -100)
    return [mask for mask in masks if mask.dim() == 2]


def counted(masks: Iterable[Tensor], x: Tensor) -> Tensor | None:
    """Return which tokens of `[..., size]` count, as bool `[...]`, by masks `[batch, length]` of the last or of all
    dimensions before `size`; None without such a mask."""
    shape = x.shape[:-1]
    flat = [mask.reshape(shape) for mask in masks if shape == (mask.numel(),)]
    theirs = flat or [mask.expand(shape) for mask in masks if shape[-2:] == mask.shape]
    return torch.stack([mask.to(x.device, torch.bool) for mask in theirs]).any(0) if theirs else None


def _with_ones(rows: Tensor) -> Tensor:
    return nn.functional.pad(rows, (0, 1), value=1.0)


def _upper_product(rows: Tensor) -> Tensor:
    """Return `rows^T rows` with zeros in most of its lower triangle: 9/16 of the work."""
    product = rows.new_zeros(rows.shape[1], rows.shape[1])
    for columns in torch.arange(rows.shape[1], device="cpu").chunk(8):
        start, end = int(columns[0]), int(columns[-1]) + 1
        torch.mm(rows[:, start:end].t(), rows[:, start:], out=product[start:end, start:])
    return product


def matrix(weight: SparseWeight) -> Tensor:
    """Return the weight as `[out, in]`, a view of what is stored."""
    return weight.storage.out_in(weight.views()[0].matrix)
