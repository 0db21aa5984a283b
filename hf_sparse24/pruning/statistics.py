"""Statistics of a layer's inputs: all that pruning needs to know of the data."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..weights.sparse_weight import SparseWeight
from ..weights.storage import WeightView
from .replay import Replay


class Gram:
    """The Gram matrix `[X, 1]^T [X, 1]` of a layer's inputs X: `[in + 1, in + 1]`, fp32, or fp64 for an fp64 weight."""

    def __init__(self, weight: Tensor, batches: int):
        size = weight.shape[1] + 1
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

    def finish(self, is_starved: bool) -> None:
        """Mirror the upper triangle; `summary` leaves most of the lower one at zero. Starved of tokens, take
        independent inputs of one size instead, by which every criterion chooses by magnitude."""
        whole = self.matrix.triu() + self.matrix.triu(1).t()
        self.matrix.copy_(torch.eye(len(whole), device=whole.device) if is_starved else whole)

    def output_norm(self, change: Tensor) -> float:
        """Return `||[X, 1] change^T||_F` for a change of weights and bias `[out, in + 1]`."""
        return ((change @ self.matrix) * change).sum().clamp(min=0).sqrt().item()


class InputNorms:
    """Sums of squares of a layer's inputs, and 128 of the inputs to measure errors on: much cheaper than a `Gram`."""

    ROWS = 128  # spread evenly over all batches

    def __init__(self, weight: Tensor, batches: int):
        self.squares = _zeros(weight, weight.shape[1])
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

    def finish(self, is_starved: bool) -> None:
        if is_starved:
            self.squares.fill_(1)
            self._rows = [torch.eye(len(self.squares) + 1, device=self.squares.device).to(self.squares)]
        self._rows = [torch.cat(self._rows)] if self._rows else []

    def output_norm(self, change: Tensor) -> float:
        return torch.linalg.norm(self._rows[0] @ change.t()).item()


def _zeros(weight: Tensor, *sizes: int) -> Tensor:
    return torch.zeros(sizes, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)


Statistics = Gram | InputNorms


class InputHooks:
    """Hooks before the layers to prune, which measure their inputs. Layers share inputs: query, key and value do."""

    def __init__(self, replay: Replay, weights: dict[str, SparseWeight], stack: ExitStack, all_experts: bool):
        self.replay, self.unpruned, self._all_experts = replay, set(weights), all_experts
        self._statistics: dict[str, list[Statistics]] | None = None
        self._x: Tensor | None = None
        self._key: object = None
        for name, weight in weights.items():
            hook = partial(self._before_layer, name, weight)
            stack.enter_context(weight.module.register_forward_pre_hook(hook, with_kwargs=True))

    @contextmanager
    def measuring(self, statistics: dict[str, list[Statistics]], masks: list[Tensor]) -> Iterator[None]:
        """Add inputs `[..., in]` to the layers' statistics, but for the padding that masks `[batch, length]` show."""
        self._statistics, self._masks, self._x = statistics, masks, None
        yield
        self._statistics = self._x = None

    def _before_layer(self, name: str, weight: SparseWeight, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._statistics is None:
            return
        if name in self.unpruned:
            self.replay.final = False
        if name not in self._statistics:
            return
        x, *routed = *args, *kwargs.values()
        if weight.is_stack:
            if len(routed) == 2 and not routed[0].is_floating_point():  # the experts of each token, and their shares
                self._add_experts(weight, self._statistics[name], x, *routed)
            return
        (statistics,) = self._statistics[name]
        key = (x._version, statistics.squares.dtype)
        if x is not self._x or key != self._key:
            rows, counts = x.reshape(-1, x.shape[-1]), counted(self._masks, x)
            rows = (rows if counts is None else rows[counts.flatten()]).to(statistics.squares)
            self._x, self._key, self._tokens = x, key, len(rows)
            with torch.autocast(rows.device.type, enabled=False):
                self._summary = statistics.summary(rows)
        statistics.add(self._summary)
        statistics.tokens += self._tokens

    def _add_experts(
        self, weight: SparseWeight, statistics: list[Statistics], hidden: Tensor, index: Tensor, shares: Tensor
    ) -> None:
        """Run each expert alone on its tokens, or on all, and add what its matrix multiplies to its statistics."""
        rows, index, module = hidden.flatten(0, -2), index.flatten(0, -2), weight.module
        counts = counted(self._masks, rows)
        forward = inspect.unwrap(module.__dict__["dense_class"].forward)  # a loop over experts, not one GEMM of all
        for expert, own in enumerate(statistics):
            chosen = (index == expert).any(-1) | self._all_experts
            x = rows[chosen if counts is None else chosen & counts]
            if len(x):
                with _Multiplied(weight.parameter) as seen:
                    forward(module, x, index.new_full((len(x), 1), expert), shares.new_ones(len(x), 1))
                for given in seen.inputs:
                    with torch.autocast(given.device.type, enabled=False):
                        own.add(own.summary(given.to(own.squares)))
                    own.tokens += len(given)


class _Multiplied(TorchFunctionMode):
    """Keeps the inputs that are multiplied by a matrix of a stack, however the code of a model does it."""

    def __init__(self, stack: Tensor):
        super().__init__()
        self._stack, self.inputs = stack, list[Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x, other = [*args, None, None][:2]
        if isinstance(x, Tensor) and isinstance(other, Tensor):
            self.inputs += [x] * (0 <= other.data_ptr() - self._stack.data_ptr() < self._stack.nbytes)
        return func(*args, **(kwargs or {}))


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


def matrix(view: WeightView) -> Tensor:
    """Return a weight as `[out, in]`, a view of what is stored."""
    return view.matrix if view.dim == 1 else view.matrix.t()
