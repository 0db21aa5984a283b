"""Solvers for transposable masks: n of every m kept along rows *and* along columns of each m x m tile.

Every solver takes the magnitudes of tiles `[T, m, m]` in fp32 or fp64 and returns bool `[T, m, m]`. Among equal
magnitudes the two fast solvers keep the lower index (row by row). Among equal patterns the exact solver takes the first
in the order of its tournament; min-cost-flow finds an optimum, but does not say which.
"""

from collections.abc import Callable
from itertools import combinations

import torch
from torch import Tensor

from .masks import pack_bits
from .prune import wide


def transposable_mask(weight: Tensor, n: int, m: int, solver: str, packed: bool) -> Tensor:
    """Split `[R, C]` into m x m tiles of the matrix itself, solve each, and join the masks."""
    rows, columns = weight.shape
    # Finite values instead of NaN and inf, because scores multiply by zero and subtract, which inf turns into NaN.
    huge = torch.finfo(torch.float32).max / m**2
    magnitude = wide(weight).abs().nan_to_num(nan=huge, posinf=huge).clamp(max=huge)
    tiles = magnitude.reshape(rows // m, m, columns // m, m).transpose(1, 2).reshape(-1, m, m)
    if solver == "exact":
        solver = "patterns" if (n, m) == (2, 4) else "min-cost-flow"
    mask = _SOLVERS[solver](tiles, n)
    mask = mask.reshape(rows // m, columns // m, m, m).transpose(1, 2).reshape(rows, columns)
    return pack_bits(mask) if packed else mask


def _by_patterns(tiles: Tensor, n: int) -> Tensor:
    """2:4 only: the best of the 90 patterns (Hu et al. 2024, Algorithm 1), found without scoring 90 sums: of the cases
    that 0, 2 or 4 columns are "mixed", kept in one upper and one lower row. "The maths" in the README derives it."""
    return torch.cat([_best_patterns(part) for part in tiles.split(1 << 16)])


_Scored = tuple[Tensor, Tensor]  # a score per tile, and the part of the mask that has it, as 16 bits


def _better(first: _Scored, second: _Scored) -> _Scored:
    """The larger score, and its bits; the first of equals."""
    return torch.maximum(first[0], second[0]), torch.where(second[0] > first[0], second[1], first[1])


def _sum(first: _Scored, second: _Scored) -> _Scored:
    return first[0] + second[0], first[1] + second[1]


def _apart(x: Tensor, y: Tensor, bits_x: int, bits_y: int) -> dict[str, _Scored]:
    """For each two columns the better way to keep one in x and the other in y. x and y are rows `[T, 4]`."""

    def keep(i: int, j: int) -> _Scored:
        score = x[:, i] + y[:, j]
        return score, torch.full_like(score, (bits_x << i) + (bits_y << j), dtype=torch.int32)

    return {"abcd"[i] + "abcd"[j]: _better(keep(i, j), keep(j, i)) for i, j in combinations(range(4), 2)}


def _all_apart(pairs: dict[str, _Scored]) -> _Scored:
    """The better way to keep two columns in one place and two in the other."""
    return _better(_sum(pairs["ac"], pairs["bd"]), _sum(pairs["ab"], pairs["cd"]))


def _best_patterns(tiles: Tensor) -> Tensor:
    row = tiles.unbind(1)
    upper, lower = _apart(row[0], row[1], 1, 16), _apart(row[2], row[3], 256, 4096)
    halves = _apart(row[0] + row[1], row[2] + row[3], 1 + 16, 256 + 4096)
    best = _all_apart(halves)
    for mixed, others in zip(upper, reversed(upper)):
        best = _better(best, _sum(_sum(upper[mixed], lower[mixed]), halves[others]))
    best = _better(best, _sum(_all_apart(upper), _all_apart(lower)))
    bits = torch.arange(16, dtype=torch.int32, device=tiles.device)
    return (best[1].unsqueeze(1) >> bits & 1).bool().reshape(tiles.shape)


def _by_min_cost_flow(tiles: Tensor, n: int) -> Tensor:
    """The optimum for any n:m (Hubara et al. 2021, section 3.1): n units from every row to every column of a tile.

    All tiles are one flow problem of unconnected parts, solved by OR-tools on the CPU. Its costs are integers:
    magnitudes scaled to 2^40 per tile, which is finer than an fp32 sum, and equal magnitudes stay equal.
    """
    try:
        from ortools.graph.python.min_cost_flow import SimpleMinCostFlow
    except ImportError as error:
        raise ImportError("the min-cost-flow solver needs OR-tools: pip install ortools") from error
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
    """From the largest down, keep what leaves at most n in its row and its column. Some tiles keep fewer than n * m.

    So does torch's `_sparse_semi_structured_tile`.
    """
    return _sweep(tiles, descending=True, fits=lambda row, column: (row < n) & (column < n))


def _by_two_approx(tiles: Tensor, n: int) -> Tensor:
    """From the smallest up, prune while the row *or* the column still has more than n (Hubara et al. 2021, Alg. 1)."""
    must_lose = tiles.shape[-1] - n
    return ~_sweep(tiles, descending=False, fits=lambda row, column: (row < must_lose) | (column < must_lose))


def _sweep(tiles: Tensor, descending: bool, fits: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
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
