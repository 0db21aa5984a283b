"""Solvers for transposable masks: n of every m kept along rows *and* along columns of each m x m tile.

Four ways to choose a mask, best first. Kept share of the L1 norm on Gaussian 4x4 tiles, 2:4:

    exact, min-cost-flow   0.703   the optimum: over all 90 legal patterns, or as a flow problem
    greedy                 0.692   keep the largest that still fits; torch's `_sparse_semi_structured_tile`
    two-approx             0.630   prune the smallest while a line still has to lose some; within 2x of the optimal loss

Every solver sees magnitudes of whole tiles `[T, m, m]` in fp32 and returns bool `[T, m, m]`. Of equals the lower index
(row by row) is kept by the two fast solvers, the first in the order of `halves()` by the exact one; min-cost-flow
promises an optimum but not which.
"""

from functools import cache
from itertools import combinations, product

import torch
from torch import Tensor

from .masks import pack_bits


def transposable_mask(weight: Tensor, n: int, m: int, solver: str, packed: bool) -> Tensor:
    """Cut `[R, C]` into m x m tiles of the matrix itself, solve each, and put the mask together again."""
    rows, columns = weight.shape
    # Finite stand-ins for NaN and inf: scores are products with zeros and differences, which inf would poison.
    huge = torch.finfo(torch.float32).max / m**2
    magnitude = weight.float().abs().nan_to_num(nan=huge, posinf=huge).clamp(max=huge)
    tiles = magnitude.reshape(rows // m, m, columns // m, m).transpose(1, 2).reshape(-1, m, m)
    if solver == "exact":
        solver = "patterns" if (n, m) == (2, 4) else "min-cost-flow"
    mask = _SOLVERS[solver](tiles, n)
    mask = mask.reshape(rows // m, columns // m, m, m).transpose(1, 2).reshape(rows, columns)
    return pack_bits(mask) if packed else mask


PAIRS = tuple(combinations(range(4), 2))
"""Which two of four columns a row may keep, in order."""


@cache
def halves() -> list[tuple[tuple[int, ...], list[tuple[int, int]]]]:
    """What two rows can leave for the other two: 19 column counts, and the pairs of row patterns that give each.

    A legal tile is two halves, rows 0-1 and rows 2-3, whose column counts add up to 2 everywhere. So the best tile is
    the best over the 19 counts of (best upper half with these counts + best lower half with the rest): 36 + 36 halves
    to score in place of 90 tiles, and the same optimum. Row patterns are indices into `PAIRS`.
    """
    ways: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for upper, lower in product(range(6), repeat=2):
        counts = tuple((i in PAIRS[upper]) + (i in PAIRS[lower]) for i in range(4))
        ways.setdefault(counts, []).append((upper, lower))
    return sorted(ways.items(), reverse=True)


def _by_patterns(tiles: Tensor, n: int) -> Tensor:
    """2:4 only: the best of the 90 patterns (Hu et al. 2024, Algorithm 1), half by half."""
    return torch.cat([_best_patterns(part) for part in tiles.split(1 << 16)])


def _best_patterns(tiles: Tensor) -> Tensor:
    device, by_counts = tiles.device, dict(halves())
    complements = [by_counts[tuple(2 - count for count in counts)] for counts in by_counts]
    # [19, 6, 2]: the ways to each count, over and over to fill the table (a repetition never wins an argmax).
    upper_ways, lower_ways = (
        torch.tensor([(ways * 6)[:6] for ways in table], device=device) for table in (by_counts.values(), complements)
    )
    left, right = torch.tensor(PAIRS, device=device).unbind(1)
    rows = tiles[..., left] + tiles[..., right]  # [T, 4, 6]: what each row keeps with each pair
    counts = torch.arange(19, device=device)
    scores, pairs = 0, []
    for first, ways in ((0, upper_ways), (2, lower_ways)):
        best = (rows[:, first, ways[..., 0]] + rows[:, first + 1, ways[..., 1]]).max(-1)
        scores = scores + best.values
        pairs.append(ways[counts, best.indices])  # [T, 19, 2]
    tile = torch.arange(len(tiles), device=device)
    winner = torch.cat(pairs, -1)[tile, scores.argmax(1)]  # [T, 4]
    return torch.tensor([[i in pair for i in range(4)] for pair in PAIRS], device=device)[winner]


def _by_min_cost_flow(tiles: Tensor, n: int) -> Tensor:
    """The optimum for any n:m (Hubara et al. 2021, section 3.1): n units from every row to every column of a tile.

    All tiles are one flow problem without ties between them, solved by OR-tools on the CPU. Costs are integers there:
    magnitudes are scaled to 2^40 per tile, finer than fp32 adds them up, and equal magnitudes stay equal.
    """
    try:
        from ortools.graph.python.min_cost_flow import SimpleMinCostFlow
    except ImportError as error:
        raise ImportError("the min-cost-flow solver needs OR-tools: pip install 'hf_sparse24[solvers]'") from error
    if tiles.is_meta:
        return tiles > 0
    count, m, _ = tiles.shape
    largest = tiles.double().amax((1, 2), keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    costs = -(tiles.double() / largest * 2**40).round().long().flatten().cpu()
    # Nodes: tile t has its rows at 2mt and its columns at 2mt + m.
    sizes = (torch.arange(size, device="cpu") for size in (count, m, m))
    tile, row, column = torch.meshgrid(*sizes, indexing="ij")
    heads, tails = (2 * m * tile + row).flatten(), (2 * m * tile + m + column).flatten()
    flow = SimpleMinCostFlow()
    arcs = flow.add_arcs_with_capacity_and_unit_cost(
        heads.numpy(), tails.numpy(), torch.ones_like(heads).numpy(), costs.numpy()
    )
    nodes = torch.arange(2 * m * count, device="cpu")
    flow.set_nodes_supplies(nodes.numpy(), torch.where(nodes % (2 * m) < m, n, -n).numpy())
    status = flow.solve()
    if count and status != flow.OPTIMAL:
        raise RuntimeError(f"min-cost-flow found no optimum for {count} tiles of {m}x{m}: {status}")
    return torch.from_numpy(flow.flows(arcs)).bool().reshape(tiles.shape).to(tiles.device)


def _by_greedy(tiles: Tensor, n: int) -> Tensor:
    """From the largest down, keep what its row and its column have room for. Some tiles end with fewer than n * m."""
    return _sweep(tiles, descending=True, fits=lambda row, column: (row < n) & (column < n))


def _by_two_approx(tiles: Tensor, n: int) -> Tensor:
    """From the smallest up, prune while the row *or* the column still has to lose some (Hubara et al. 2021, Alg. 1).

    The pruned magnitude is at most twice the least possible. Lines that others prune from end with fewer than n.
    """
    must_lose = tiles.shape[-1] - n
    return ~_sweep(tiles, descending=False, fits=lambda row, column: (row < must_lose) | (column < must_lose))


def _sweep(tiles: Tensor, descending: bool, fits) -> Tensor:
    """Visit each tile's elements by magnitude and take those for which `fits(taken in row, taken in column)`."""
    count, m, _ = tiles.shape
    flat = tiles.flatten(1)
    # Ties: the lower index is kept, so it is visited first when taking means keeping and last when it means pruning.
    order = flat.sort(dim=1, descending=True, stable=True).indices
    if not descending:
        order = order.flip(1)
    taken = torch.zeros_like(flat, dtype=torch.bool)
    in_row = torch.zeros(count, m, dtype=torch.long, device=tiles.device)
    in_column = torch.zeros_like(in_row)
    for element in order.unbind(1):
        row, column = (element // m).unsqueeze(1), (element % m).unsqueeze(1)
        take = fits(in_row.gather(1, row), in_column.gather(1, column))
        taken.scatter_(1, element.unsqueeze(1), take)
        in_row.scatter_add_(1, row, take.long())
        in_column.scatter_add_(1, column, take.long())
    return taken.reshape(tiles.shape)


_SOLVERS = {
    "patterns": _by_patterns,
    "min-cost-flow": _by_min_cost_flow,
    "greedy": _by_greedy,
    "two-approx": _by_two_approx,
}
