"""How good are the solvers for transposable masks? Kept magnitude against the optimum, and time, as a table.

python recipes/mask_quality.py [--size 1024] [--seed 0]
"""

import argparse
import time
from functools import cache, partial
from math import comb

import torch
from sparse24_kernels import nm_mask, transposable_mask
from sparse24_kernels.transposable import SOLVERS

from hf_sparse24.metrics import kept_magnitude

PATTERNS = ((2, 4), (4, 8), (8, 16))


def table(size: int, seed: int) -> str:
    """Markdown; Gaussian weights `[size, size]`, `size` a multiple of 16."""
    weight = torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
    head = (
        "pattern",
        "solver",
        "kept of the L1 norm",
        "of the optimum",
        "kept",
        "ns per weight",
        "masks per 256 weights",
    )
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for n, m in PATTERNS:
        best = kept_magnitude(weight, transposable_mask(weight, n, m))
        count = f"{mask_diversity(n, m, 256):.1e}"
        both_ways = f"{mask_diversity(n, m, 256, transposable=True):.1e}" if m <= 8 else "not counted"
        rows = [("rows only", partial(nm_mask, weight, n, m), count)]
        rows += [(solver, partial(transposable_mask, weight, n, m, solver), both_ways) for solver in SOLVERS]
        for name, make, count in rows:
            start = time.perf_counter()
            mask = make()
            seconds = time.perf_counter() - start
            kept = kept_magnitude(weight, mask)
            lines.append(
                f"| {n}:{m} | {name} | {kept:.4f} | {kept / best:.4f} | {mask.float().mean():.4f} | "
                f"{seconds / weight.numel() * 1e9:.1f} | {count} |"
            )
    return "\n".join(lines)


def mask_diversity(n: int, m: int, numel: int, transposable: bool = False) -> int:
    """How many N:M masks `numel` weights have (Hubara et al. 2021, arXiv 2102.08124, section 2), as an exact integer.

    Transposable masks have N ones in every row and column of each M x M tile: 90 ways for 2:4 and 116 963 796 250 for
    4:8. The paper's formula for them, `M! (M-1)! ... (M-N+1)!`, counts too many: 144 and 1.8e13.
    """
    unit = m * m if transposable else m
    assert numel % unit == 0, f"{numel} is no multiple of {unit}"
    ways = _matrices(tuple([n] * m), n) if transposable else comb(m, n)
    return ways ** (numel // unit)


@cache
def _matrices(wanted: tuple[int, ...], n: int) -> int:
    """How many 0/1 matrices with n ones per row have the column sums `wanted`, counted row by row.

    The order of the columns does not matter, so `wanted` is kept sorted: 4:8 takes a few hundred states.
    """
    rows_left = sum(wanted) // n
    if rows_left == 0:
        return 1
    counts = {value: wanted.count(value) for value in set(wanted)}

    def choose(values: list[int], ones: int, taken: dict[int, int]) -> int:
        if not values:
            if ones:
                return 0
            rest = [v - (i < taken[v]) for v in counts for i in range(counts[v])]
            return _matrices(tuple(sorted(rest)), n)
        value = values[0]
        return sum(
            comb(counts[value], k) * choose(values[1:], ones - k, taken | {value: k})
            for k in range(min(ones, counts[value]) + 1)
            if value > 0 or k == 0
        )

    return choose(sorted(counts), n, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.size % 16:
        parser.error(f"--size {args.size}: must be a multiple of 16")
    print(f"Gaussian weights {args.size} x {args.size}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print(table(args.size, args.seed))


if __name__ == "__main__":
    main()
