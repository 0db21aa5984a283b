"""Channel permutation: an order of hidden channels in which N:M pruning loses less, and the same function before it.

Which channels share a group of M is an accident of training. Where a linear layer's inputs are channels that nothing
else reads, their order is free: it takes the columns of that layer and the rows, with the bias, of the layers that make
them. The weights are exchanged in place, so what is pruned, exported and run afterwards is an ordinary model. Free are

* the hidden channels of an MLP: columns of `down_proj`, rows of `gate_proj` and `up_proj`;
* the channels inside each attention head: columns of `o_proj`, rows of `v_proj`, in one order for all query heads that
  share the values of one head.

Head order, and queries and keys under RoPE, are not, or gain nothing. The residual stream has one order for the whole
model, which gains little for all its layers at once, and is left alone.
"""

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from ..progress import Progress, get_logger
from ..weights.place import layer_name
from ..weights.sparse_weight import SparseWeight
from .calibration import evaluating, input_statistics
from .replay import Batch
from .statistics import Sample, matrix

logger = get_logger(__name__)

FREE: dict[str, dict[str, tuple[str, ...]]] = {
    "MLP": {
        "down_proj": ("gate_proj", "up_proj"),  # Llama and most others
        "fc2": ("fc1",),  # OPT, Phi
        "c_proj": ("c_fc",),  # GPT-2
        "dense_4h_to_h": ("dense_h_to_4h",),  # GPT-NeoX, Bloom, Falcon
        "output.dense": ("intermediate.dense",),  # BERT
    },
    "attention head": {"o_proj": ("v_proj",), "out_proj": ("v_proj",), "output.dense": ("self.value",)},
}
"""The layers that take channels in any order, and those that make them, by their names in the same module."""


class _Free(NamedTuple):
    """The free input channels of a layer: which they are, the layers that make them, and how many have one order."""

    kind: str
    makers: list[nn.Linear | Conv1D]
    width: int


@torch.no_grad()
def permute_channels(
    model: nn.Module, weights: dict[str, SparseWeight], batches: list[Batch], undo: ExitStack
) -> tuple[float, float] | None:
    """Order the free input channels of `weights` so that N:M masks keep most of what each weight adds to the output.

    That is its square times its input's sum of squares, from one pass of the dense model over `batches`. If the model's
    output for the first of them changes by more than rounding, the channels of that kind go back, with a warning.

    Args:
        model: computes with its weights as they are.
        weights: those that will be pruned, by name. Layers that are not in `FREE` are left alone.
        batches: keyword arguments, see `check_batch`.
        undo: what puts the weights back, bit for bit, is added to it.

    Returns:
        The kept share of all squares before and after, the mean of the layers; None if no channels are free.

    Reference: Pool & Yu 2021 (NeurIPS, "Channel Permutations for N:M Sparsity"), for magnitudes. Our deviations: the
    inputs count, as in RIA's permutation (ICLR 2024, openreview Tr0lPx9woF); the search is `best_order`.
    """
    found = {name: free for name, weight in weights.items() if (free := _free_channels(model, name, weight))}
    if not found:
        logger.warning("permute: no channels are known to be free in this model; their order is unchanged")
        return None
    statistics = input_statistics(model, {name: weights[name] for name in found}, batches, Sample)
    expected = _outputs(model, batches[0])
    shares = []
    for kind in FREE:
        names = [name for name, free in found.items() if free.kind == kind]
        kept = []
        with Progress(f"ordering {kind} channels", len(names), "layer") as progress, ExitStack() as back:
            for name in names:
                squares = statistics[name].squares
                score = matrix(weights[name]).to(squares).square() * squares
                kept.append(_order(weights[name], found[name], score, back))
                progress.update()
            change = _change(expected, _outputs(model, batches[0])) if names else 0.0
            if change <= torch.finfo(weights[next(iter(found))].parameter.dtype).eps ** 0.5:
                undo.push(back.pop_all())
                shares += kept
            else:
                logger.warning(
                    f"permute: the order of {kind} channels is unchanged, because the model's output depends on it: it "
                    f"changed by {change:.1g} of its norm"
                )
    if not shares:
        return None
    before, after = (sum(share) / len(shares) for share in zip(*shares))
    logger.info(f"permute: masks keep {after:.1%} of the squares in {len(shares)} layers, {before:.1%} before")
    return before, after


def _free_channels(model: nn.Module, name: str, weight: SparseWeight) -> _Free | None:
    place, inputs = layer_name(name), matrix(weight).shape[1]
    for kind, layers in FREE.items():
        for layer, makers in layers.items():
            parent = place.removesuffix(layer)
            modules = (_module(model, parent + maker) for maker in makers)
            made_by = [module for module in modules if isinstance(module, nn.Linear | Conv1D)]
            if parent == place or not made_by:
                continue
            attention = _module(model, (parent + makers[0]).rpartition(".")[0])
            width = getattr(attention, "head_dim", getattr(attention, "attention_head_size", 0))
            width = inputs if kind == "MLP" else width
            made = {_made(module) for module in made_by}
            fits = width and len(made) == 1 and width % weight.method.pattern.m == 0
            if fits and max(made) % width == 0 and inputs % max(made) == 0:
                return _Free(kind, made_by, width)
    return None


def _module(model: nn.Module, name: str) -> Any:
    """Return a module by name, None if there is none."""
    with suppress(AttributeError):
        return model.get_submodule(name)
    return None


def _input_dim(module: nn.Module) -> int:
    return 0 if isinstance(module, Conv1D) else 1


def _made(module: nn.Linear | Conv1D) -> int:
    return int(module.weight.shape[1 - _input_dim(module)])


def _order(weight: SparseWeight, free: _Free, score: Tensor, undo: ExitStack) -> tuple[float, float]:
    """Exchange the channels of one layer, and return the kept share of its score before and after."""
    (n, m), (outputs, inputs) = weight.method.pattern, score.shape
    made = _made(free.makers[0])
    # [values' head, its query heads and their outputs, channel]; an MLP is one head.
    heads = score.view(outputs, made // free.width, -1, free.width).permute(1, 2, 0, 3).flatten(1, 2)
    orders = torch.stack([best_order(head, n, m) for head in heads])
    first = torch.arange(0, made, free.width, device=score.device)
    rows = (orders + first[:, None]).flatten()
    first = torch.arange(0, inputs, free.width, device=score.device).view(len(heads), -1, 1)
    columns = (orders[:, None] + first).flatten()
    exchanged: list[tuple[Tensor, int, Tensor]] = [(weight.parameter, weight.input_dim, columns)]
    for maker in free.makers:
        exchanged.append((maker.weight, 1 - _input_dim(maker), rows))
        if maker.bias is not None:
            exchanged.append((maker.bias, 0, rows))
    for parameter, dim, order in exchanged:
        _exchange(parameter, dim, order)
        undo.callback(_exchange, parameter, dim, order.argsort())
    return kept_share(score, n, m), kept_share(score[:, columns], n, m)


@torch.no_grad()
def _exchange(parameter: Tensor, dim: int, order: Tensor) -> None:
    parameter.copy_(parameter.index_select(dim, order.to(parameter.device)))


def _outputs(model: nn.Module, batch: Batch) -> list[Tensor]:
    device = next(model.parameters()).device
    with evaluating(model), torch.autocast(device.type, enabled=False):  # its rounding is that of bf16
        output = model(**{name: value.to(device) for name, value in batch.items()})
    return [
        leaf.float()
        for leaf in tree_leaves(dict(output) if isinstance(output, Mapping) else output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def _change(expected: list[Tensor], found: list[Tensor]) -> float:
    norms = [((b - a).norm() / a.norm().clamp(min=torch.finfo(a.dtype).tiny)).item() for a, b in zip(expected, found)]
    return max(norms, default=float("nan"))


def kept_share(score: Tensor, n: int, m: int) -> float:
    """Return the share of a score `[out, in]`, >= 0, that the `n` largest of every `m` have."""
    kept = score.unflatten(1, (-1, m)).topk(n, 2).values
    return (kept.sum(dtype=torch.float64) / score.sum(dtype=torch.float64).clamp(min=1e-300)).item()


def best_order(score: Tensor, n: int, m: int, sweeps: int = 10) -> Tensor:
    """Return the order of the columns of `score` `[rows, in]` whose `kept_share` is largest, as far as found: `[in]`.

    Starts from the columns by their sums, dealt to the groups in snake order, as RIA does, or from the given order if
    that keeps more. Then one column of every group is taken out, and all of them are handed out anew, by exchanges of
    two. What a column adds to a group does not depend on where the others go, so that every exchange counts exactly,
    and many are done at once. Nothing gets worse.

    Takes time and memory for `[in / m, in / m]` matrices of sums over all rows.

    Args:
        score: >= 0, `in` a multiple of `m`.
        n: kept of each group.
        m: size of a group.
        sweeps: at most so many times each column is handed out; it ends when one gains less than 1e-4.
    """
    given = torch.arange(score.shape[1], device=score.device)
    groups = score.sum(0).argsort(descending=True).view(m, -1)  # [m, groups]
    groups[1::2] = groups[1::2].flip(1)
    start = kept_share(score, n, m)
    share = kept_share(score[:, groups.t().flatten()], n, m)
    if share <= start:
        groups, share = given.view(-1, m).t().contiguous(), start
    for _ in range(sweeps):
        for slot in range(m):
            # A column x adds max(x, limit) to a group whose other columns have `limit` as their n-th largest.
            others = torch.cat([groups[:slot], groups[slot + 1 :]])
            limit = score[:, others].topk(n, 1).values[:, -1]  # [rows, groups]
            columns = score[:, groups[slot]].t()
            value = torch.stack([torch.maximum(column[:, None], limit).sum(0) for column in columns], 1)
            groups[slot] = groups[slot][_assign(value)]
        before, share = share, kept_share(score[:, groups.t().flatten()], n, m)
        if share - before < 1e-4 * share:
            break
    return groups.t().flatten() if share > start else given


def _assign(value: Tensor) -> Tensor:
    """Return a candidate for each group, of which no exchange of two adds to the sum of `value[group, candidate]`."""
    groups = torch.arange(len(value), device=value.device)
    chosen = groups.clone()
    for _ in range(10 * len(value)):
        given = value[:, chosen]
        own = given.diagonal()
        gain, partner = (given + given.t() - own - own[:, None]).max(1)
        agreed = (partner[partner] == groups) & (gain > 1e-6 * own)
        if not agreed.any():
            break
        chosen = torch.where(agreed, chosen[partner], chosen)
    return chosen
